"""Threads that prevent a fork."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """\
import errno, os, threading
from slurm_elastic.agent.forkserver._thread_origins import unknown_threads

def fail(*arguments):
    raise OSError(errno.EIO, "no such memory")

threading.Thread(target=threading.Event().wait, daemon=True).start()
os.pread = fail
print(len(unknown_threads()), flush=True)
os._exit(0)
"""


def test_a_thread_whose_stack_cannot_be_read_is_unknown() -> None:
    assert subprocess.check_output([sys.executable, "-c", SCRIPT], text=True) == "1\n"
