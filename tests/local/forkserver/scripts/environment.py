import ctypes
import os
import subprocess

getenv = ctypes.CDLL(None).getenv
getenv.restype = ctypes.c_char_p
print(ascii({name: value for name, value in sorted(os.environ.items()) if name != "TORCHELASTIC_ERROR_FILE"}))
print([getenv(name) for name in (b"RANK", b"PYTHONPATH", b"SLURM_ELASTIC_WARM", b"GIVEN")])
print(subprocess.check_output("echo $RANK $GIVEN; env | wc -l", shell=True))
print(len(os.environ["LONG"]), os.environ["GIVEN"].encode("utf-8", "surrogateescape"))
