import ctypes
import os
import sys
from pathlib import Path

for stream in (sys.stdin, sys.stdout, sys.stderr):
    file = Path(f"/proc/self/fd/{stream.fileno()}").readlink().name
    print(stream.name, stream.mode, stream.encoding, stream.errors, stream.line_buffering, stream.newlines, file)
    print(stream.isatty(), type(stream.buffer).__name__, getattr(stream, "write_through", None))
print(sys.stdout is sys.__stdout__, sys.stderr is sys.__stderr__, sys.stdin is sys.__stdin__)
print(sorted(int(link.name) for link in Path("/proc/self/fd").iterdir()), os.get_inheritable(1))
print("python without a newline, ", end="")
libc = ctypes.CDLL(None)
libc.printf(b"C, ")
libc.fflush(None)
os.system("echo and a shell")
os.write(1, b"straight to the descriptor\n")
print("error", file=sys.stderr)
sys.stdout.write("unfinished end")
