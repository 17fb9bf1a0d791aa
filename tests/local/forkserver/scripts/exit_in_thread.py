import threading


def fail():
    raise ValueError("in a thread")


threading.Thread(target=fail, name="failing").start()
