"""Processes, as /proc shows them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

GUARD = 20.0


def state(path: Path) -> str:
    """Return the letter of a process or thread's state, Z when it is gone (proc(5))."""
    try:
        return (path / "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "Z"


def gone(pid: int) -> bool:
    return state(Path(f"/proc/{pid}")) == "Z"


def wait_gone(pid: int) -> None:
    deadline = time.monotonic() + GUARD
    while not gone(pid):
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.02)


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Have a process stand still; a thread of it may still answer while the signal is on its way."""
    os.kill(pid, signal.SIGSTOP)
    try:
        deadline = time.monotonic() + GUARD
        while any(state(thread) not in "TZ" for thread in Path(f"/proc/{pid}/task").iterdir()):
            assert time.monotonic() < deadline, f"process {pid} does not stop"
            time.sleep(0.01)
        yield
    finally:
        os.kill(pid, signal.SIGCONT)
