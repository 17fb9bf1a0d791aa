"""Limits on processes of this machine, by a cgroup of their own, version 1 or 2."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")


@contextlib.contextmanager
def cpu_limit(pids: Sequence[int], share: float) -> Iterator[None]:
    """Give processes a share of one processor."""
    period = 100000
    quota = f"{share * period:.0f}"
    with _group("cpu", pids) as (group, is_first):
        if is_first:
            (group / "cpu.cfs_period_us").write_text(f"{period}")
            (group / "cpu.cfs_quota_us").write_text(quota)
        else:
            (group / "cpu.max").write_text(f"{quota} {period}")
        yield


@contextlib.contextmanager
def write_limit(device: Path, speed: int) -> Iterator[None]:
    """Limit the writes of this process, and of what it starts, to `speed` bytes per second of a block device."""
    number = device.stat().st_rdev
    name = f"{os.major(number)}:{os.minor(number)}"
    of_all = _CGROUPS / "blkio/blkio.throttle.write_bps_device"
    if of_all.exists():
        # In version 1 the kernel itself, in the root group, writes what processes have left in its cache.
        of_all.write_text(f"{name} {speed}")
        try:
            yield
        finally:
            of_all.write_text(f"{name} 0")
        return
    with _group("io", [os.getpid()]) as (group, _):
        (group / "io.max").write_text(f"{name} wbps={speed}")
        yield


@contextlib.contextmanager
def _group(controller: str, pids: Sequence[int]) -> Iterator[tuple[Path, bool]]:
    """A group with these processes, and whether it is one of version 1; they leave it at the end."""
    first = _CGROUPS / controller
    is_first = first.is_dir()
    group = (first if is_first else _CGROUPS) / f"slurm-elastic-test-{os.getpid()}"
    group.mkdir()
    before = _group_of(pids[0], controller if is_first else "")
    try:
        for pid in pids:
            (group / "cgroup.procs").write_text(str(pid))
        yield group, is_first
    finally:
        for line in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                (before / "cgroup.procs").write_text(line)
        group.rmdir()


def _group_of(pid: int, controller: str) -> Path:
    """The cgroup in which a process is."""
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            return _CGROUPS / controller / path.lstrip("/")
    raise AssertionError(f"process {pid} is in no cgroup of {controller}")
