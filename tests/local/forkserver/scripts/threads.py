import os
import threading
from pathlib import Path

print(threading.enumerate()[0].name, len(threading.enumerate()), len(list(Path("/proc/self/task").iterdir())))
print(threading.main_thread().native_id == os.getpid(), threading.get_ident() == threading.main_thread().ident)
print(threading.current_thread() is threading.main_thread())
