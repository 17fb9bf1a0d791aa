import ctypes
import faulthandler
import os

faulthandler.enable(all_threads=True)
faulthandler.dump_traceback()
print(os.getenv("TORCHELASTIC_RUN_ID"))
ctypes.string_at(0)
