import atexit
import os

atexit.register(print, "never printed")
os._exit(7)
