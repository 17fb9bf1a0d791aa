"""What agents and their processes for snapshots use while they live, and what they leave behind on their nodes."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import NamedTuple

from tests.cluster.testbed import Cluster
from tests.cluster.testbed.processes import init_of

_MORE_FILES = 40
"""By how many an agent's open files may grow: connections to other agents, and what a leader needs."""
_MORE_MEMORY = 64 << 20
"""By how many bytes the memory of an agent, or of one of its processes for snapshots, may grow."""
_WATCHED = ("slurm-elastic agent", "slurm-elastic checkpoint_writer", "slurm_elastic.snapshot.")
_SETTLED = 30.0
"""Seconds after which an agent has imported what it needs and has joined: it uses more before."""
_DIRECTORIES = 2
"""That one agent has in /dev/shm. Those of a killed agent stay until the next one comes."""


class _Use(NamedTuple):
    name: str
    age: float
    files: int
    memory: int


class Leaks:
    """Open files and memory of all agents of a cluster, from the first look at each that has settled to the last.

    Args:
        cluster: The cluster.
        strangers: Connections that others keep open to an agent at most.
    """

    def __init__(self, cluster: Cluster, strangers: int = 0) -> None:
        self._cluster, self._more_files = cluster, _MORE_FILES + strangers
        self._first: dict[int, _Use] = {}
        self._most: dict[int, _Use] = {}

    def look(self) -> None:
        """Note what each agent uses now."""
        for node in self._cluster.settings.node_names:
            for process in self._cluster.processes(node):
                # It may end at any moment.
                with contextlib.suppress(OSError, StopIteration):
                    watched = any(words in process.command for words in _WATCHED)
                    if watched and not process.command.startswith("srun"):
                        self._note(process.pid, f"{process.command.strip()} on {node}")

    def _note(self, pid: int, name: str) -> None:
        age = _age(pid)
        if pid not in self._first and age < _SETTLED:
            return
        files = [*Path(f"/proc/{pid}/fd").iterdir()]
        status = Path(f"/proc/{pid}/status").read_text().splitlines()
        memory = next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon:"))
        # Also what of a snapshot is not mapped.
        memory += sum(file.stat().st_size for file in files if str(file.readlink()).startswith("/memfd:"))
        now = _Use(name, age, len(files), memory)
        self._first.setdefault(pid, now)
        before = self._most.setdefault(pid, now)
        if now.memory > before.memory:
            self._most[pid] = now._replace(files=max(now.files, before.files))
        elif now.files > before.files:
            self._most[pid] = before._replace(files=now.files)

    def found(self) -> list[str]:
        """What is wrong, when no agent lives any more."""
        watched = [(first, self._most[pid]) for pid, first in self._first.items()]
        files = max((most.files - first.files for first, most in watched), default=0)
        memory = max((most.memory - first.memory for first, most in watched), default=0)
        print(f"processes watched: {len(watched)}; open files grew by {files} at most, memory by {memory >> 20} MiB")
        wrong = []
        for first, most in watched:
            if most.files - first.files > self._more_files:
                wrong.append(f"{first.name}: open files grew from {first.files} to {most.files}")
            if most.memory - first.memory > _MORE_MEMORY:
                wrong.append(
                    f"{first.name}: memory grew from {first.memory >> 20} MiB after {first.age:.0f} s of life to "
                    f"{most.memory >> 20} MiB after {most.age:.0f} s"
                )
        return wrong + self._left()

    def _left(self) -> list[str]:
        wrong = []
        for node in self._cluster.settings.node_names:
            init = init_of(self._cluster.settings.namespace(node))
            left = [path.name for path in Path(f"/proc/{init.pid}/root/dev/shm").iterdir()] if init is not None else []
            if len(left) > _DIRECTORIES:
                wrong.append(f"left in /dev/shm of {node}: {', '.join(sorted(left))}")
        return wrong


def _age(pid: int) -> float:
    """Seconds since a process has started."""
    started = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")
