"""What a process uses, as the kernel counts it."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Usage:
    """A process at one moment; memory in MiB: resident, and its proportional share of it."""

    resident: float
    share: float
    descriptors: int
    threads: int


def usage(pid: int | None = None) -> Usage:
    """What a process uses now; this one if no `pid` is given."""
    directory = Path(f"/proc/{pid or os.getpid()}")
    rollup = _fields((directory / "smaps_rollup").read_text())
    threads = threading.active_count() if pid is None else len(list((directory / "task").iterdir()))
    return Usage(
        resident=rollup["Rss"] / 1024,
        share=rollup["Pss"] / 1024,
        descriptors=len(list((directory / "fd").iterdir())),
        threads=threads,
    )


def process_cpu_seconds(pid: int) -> float:
    """CPU time of a process, of threads that have ended, too (clock_getcpuclockid(3): clocks of Linux by process)."""
    return time.clock_gettime(~pid << 3 | 2)


def cpu_seconds(pid: int) -> float:
    """CPU time of all threads that the process has now (proc(5), schedstat: nanoseconds)."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9


def _fields(text: str) -> dict[str, int]:
    rows = (line.split() for line in text.splitlines()[1:])
    return {row[0].rstrip(":"): int(row[1]) for row in rows if len(row) == 3}
