"""Counts of the kernel: processes that it has killed for lack of memory, and the memory that a process has."""

from __future__ import annotations

from pathlib import Path

_ROOT = Path("/")


def memory_kills(root: Path = _ROOT) -> int | None:
    """Return the number of processes of this agent's control group that the kernel has killed for lack of memory.

    Workers are in the control group of their agent. Where it has no counter, those of the whole node are counted.

    Args:
        root: The root of the file system, for tests.

    Returns:
        The number since the control group was made, or since the node booted; None if the kernel does not say.
    """
    for path in (*_files(root), root / "proc/vmstat"):
        try:
            lines = path.read_text().splitlines()
        except OSError:
            continue
        # "oom_kill" in memory.events (cgroup-v2.html), memory.oom_control (v1, since Linux 4.13) and vmstat.
        counts = [line.split()[1] for line in lines if line.startswith("oom_kill ")]
        if counts and counts[0].isdigit():
            return int(counts[0])
    return None


def resident(pid: int, root: Path = _ROOT) -> int:
    """Return the bytes of memory that a process has in RAM; 0 if it has ended."""
    try:
        lines = (root / f"proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    # proc_pid_status(5)
    sizes = [line.split()[1] for line in lines if line.startswith("VmRSS:")]
    return int(sizes[0]) * 1024 if sizes else 0


def _files(root: Path) -> list[Path]:
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    paths = []
    for line in lines:
        # cgroups(7): hierarchy, controllers, path; the hierarchy of version 2 has number 0 and names no controllers.
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            paths.append(root / "sys/fs/cgroup" / path.lstrip("/") / "memory.events")
        elif "memory" in controllers.split(","):
            paths.append(root / "sys/fs/cgroup/memory" / path.lstrip("/") / "memory.oom_control")
    return paths
