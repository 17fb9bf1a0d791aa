"""Runs a training script whose pause after each step is this: while there is a file ``hold``, the sixth one lasts.

A worker that it holds says so by a file ``holds.<round>.<rank>`` with its process id.
"""

from __future__ import annotations

import itertools
import os
import runpy
import sys
import time
from pathlib import Path

pauses, sleep = itertools.count(1), time.sleep


def pause(_: float) -> None:
    if next(pauses) == 6 and Path("hold").exists():
        name = f"holds.{os.environ.get('SLURM_ELASTIC_ROUND', '0')}.{os.environ.get('RANK', '0')}"
        Path(f".{name}").write_text(str(os.getpid()))
        Path(f".{name}").rename(name)
        while Path("hold").exists():
            sleep(0.01)


time.sleep = pause
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
