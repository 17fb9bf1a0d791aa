"""Delays the names of files in run directories: a file is written whole, and has its name up to 0.5 s later."""

import os
import random
import sys
import time

_FILE = 0.5
_random = random.Random(f"{os.environ.get('SLURM_ELASTIC_TEST_LATE')} {os.getpid()}")


def _delay(event: str, arguments: tuple[object, ...]) -> None:
    if event in ("os.rename", "os.link") and "/elastic-runs/" in os.fspath(arguments[1]):  # type: ignore[call-overload]
        time.sleep(_random.uniform(0, _FILE))


if "SLURM_ELASTIC_TEST_LATE" in os.environ:
    sys.addaudithook(_delay)
