"""What a process uses, as the kernel counts it."""

from __future__ import annotations

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


def usage(pid: int | None) -> Usage:
    """What a process that was started uses now."""
    directory = Path(f"/proc/{pid}")
    rows = (line.split() for line in (directory / "smaps_rollup").read_text().splitlines()[1:])
    kib = {row[0]: int(row[1]) for row in rows if len(row) == 3}
    return Usage(
        resident=kib["Rss:"] / 1024,
        share=kib["Pss:"] / 1024,
        descriptors=len(list((directory / "fd").iterdir())),
        threads=len(list((directory / "task").iterdir())),
    )


def cpu_seconds(pid: int | None) -> float:
    """CPU time of a process that was started, of ended threads, too (clock_getcpuclockid(3): clocks of Linux)."""
    assert pid is not None
    return time.clock_gettime(~pid << 3 | 2)
