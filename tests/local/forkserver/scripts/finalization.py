import atexit
import logging
import logging.handlers
import sys
import threading
import time
import weakref


class Thing:
    def __del__(self):
        print("thing is deleted", sys is not None)


def late():
    while threading.main_thread().is_alive():
        time.sleep(0.01)
    print("thread ends after", threading.main_thread().is_alive())


thing = Thing()
weakref.finalize(thing, print, "finalizer")
atexit.register(print, "second")
atexit.register(print, "first")
memory = logging.handlers.MemoryHandler(100, target=logging.StreamHandler(sys.stdout))
logging.getLogger().addHandler(memory)
logging.getLogger().warning("flushed by shutdown")
threading.Thread(target=late).start()
print("end of script")
