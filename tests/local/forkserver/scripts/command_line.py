import os
import sys
from pathlib import Path

print(ascii(sys.argv), ascii(sys.orig_argv), sys.executable, sys.flags, sys.path, sys.warnoptions, sys._xoptions)
print(Path("/proc/self/cmdline").read_bytes(), Path.cwd(), Path("/proc/self/exe").readlink())
print(os.umask(0), os.nice(0), os.sched_getaffinity(0), sys.getrecursionlimit(), sys.gettrace(), sys.getprofile())
