"""Limits what imports take to a part of the memory that the machine, or the job's cgroup, has free."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator

_SHARE_OF_MEMORY = 0.5
"""The part of the free memory that imports may take: the rest is for workers."""


@contextlib.contextmanager
def limited_memory() -> Iterator[None]:
    """Limit imports to a part of the free memory; allocations beyond it fail in this process and not in a worker."""
    free = _free_memory()
    kept = resource.getrlimit(resource.RLIMIT_DATA)
    if free is not None:
        # RLIMIT_DATA counts private writable memory (getrlimit(2), since Linux 4.7); statm(5) has that in pages.
        with open("/proc/self/statm", "rb") as file:  # noqa: PTH123
            data = int(file.read().split()[5]) * resource.getpagesize()
        limit = data + int(free * _SHARE_OF_MEMORY)
        soft = limit if kept[1] == resource.RLIM_INFINITY else min(limit, kept[1])
        resource.setrlimit(resource.RLIMIT_DATA, (soft, kept[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, kept)


def _free_memory() -> int | None:
    """Return the free bytes of the machine or of this job's cgroup, whichever is less; None if neither is known."""
    sizes = []
    with contextlib.suppress(OSError, ValueError, StopIteration):
        with open("/proc/meminfo", "rb") as file:  # noqa: PTH123
            line = next(line for line in file if line.startswith(b"MemAvailable:"))
        sizes.append(int(line.split()[1]) * 1024)
    with contextlib.suppress(OSError, ValueError):
        with open("/proc/self/cgroup") as file:  # noqa: PTH123
            groups = [line.rstrip("\n").split(":", 2) for line in file]
        for _number, controllers, group in groups:
            names = controllers.split(",")
            root, limit, used, cache = (
                ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")
                if controllers == ""
                else ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            )
            if controllers == "" or "memory" in names:
                # Limits of the groups above hold, too (Slurm sets them for the job, the step and the task).
                while group not in ("", "/"):
                    with contextlib.suppress(OSError, ValueError):
                        free = _number_in(f"{root}{group}/{limit}") - _number_in(f"{root}{group}/{used}")
                        sizes.append(free + _statistic(f"{root}{group}/memory.stat", cache))
                    group = group.rpartition("/")[0]
    return max(0, min(sizes)) if sizes else None


def _number_in(path: str) -> int:
    with open(path) as file:  # noqa: PTH123
        return int(file.read())


def _statistic(path: str, name: str) -> int:
    with open(path) as file:  # noqa: PTH123
        return next((int(value) for key, value in map(str.split, file) if key == name), 0)
