"""Waiting for what happens in other processes, and looking at them."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import pytest

from tests import late

HANG = 90.0
"""Seconds after which something that should have happened at once is taken to hang. An agent that is a fresh process
imports torch first, which takes ten times as long where ten processes want a processor."""


def eventually(happened: Callable[[], Any], explain: Callable[[], str] = str) -> Any:
    """Wait until this is true, and return it; else fail with an explanation."""
    late.look()
    deadline = time.monotonic() + HANG
    while not (result := happened()):
        if time.monotonic() > deadline:
            pytest.fail(f"not within {HANG:g} s: {explain()}")
        time.sleep(0.01)
    return result


@contextlib.contextmanager
def meanwhile(action: Callable[[], Any], after: float = 0.0) -> Iterator[list[Any]]:
    """Another thread does this meanwhile, after so many seconds; at the end its result is in the list."""
    results: list[Any] = []
    thread = threading.Timer(after, lambda: results.append(action()))
    thread.daemon = True
    thread.start()
    yield results
    thread.join(HANG)
    assert results, "it goes on, or has raised an error"


def process_state(pid: int) -> tuple[str, str] | None:
    """The state of a process, and when it began: a process id alone may be another one's by now. None if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return fields[0], fields[19]


def is_there(seen: dict[str, Any]) -> bool:
    """Whether a worker that wrote this down, see worker.py, is there, alive or not yet reaped."""
    state = process_state(seen["pid"])
    return state is not None and state[1] == seen["began"]


def descriptors() -> dict[int, str]:
    """What this process has open, by number."""
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found[int(entry.name)] = str(entry.readlink())
    return found


class Process(Protocol):
    """What has a process id, such as an agent."""

    pid: int


def at_once(signals: Sequence[tuple[Process, signal.Signals]]) -> None:
    """Signal several processes, as Slurm does: none of them acts before all have their signal."""
    for process, _ in signals:
        os.kill(process.pid, signal.SIGSTOP)
    for process, _ in signals:
        eventually(lambda pid=process.pid: (process_state(pid) or "T")[0] == "T")
    for process, number in signals:
        os.kill(process.pid, number)
    for process, _ in signals:
        os.kill(process.pid, signal.SIGCONT)
