"""What agents use while they live, and what they leave behind on their nodes when all is over."""

from __future__ import annotations

import contextlib
from pathlib import Path

from tests.cluster.testbed import Cluster
from tests.cluster.testbed.processes import init_of

__all__ = ["Leaks"]

_MORE_FILES = 40
"""By how many an agent's open files may grow: connections to other agents, and what a leader needs."""
_MORE_MEMORY = 64 << 10
"""By how much an agent's memory may grow, in KiB."""
_DIRECTORIES = 2
"""That one agent has in /dev/shm. Those of a killed agent stay until the next one comes."""


class Leaks:
    """Open files and memory of all agents of a cluster, from the first look at each to the last."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._first: dict[int, tuple[int, int]] = {}
        self._most: dict[int, tuple[int, int]] = {}

    def look(self) -> None:
        """Note what each agent uses now."""
        for node in self._cluster.settings.node_names:
            for process in self._cluster.processes(node):
                # It may end at any moment.
                with contextlib.suppress(OSError, StopIteration):
                    if "slurm-elastic agent" in process.command and not process.command.startswith("srun"):
                        self._note(process.pid)

    def _note(self, pid: int) -> None:
        files = len([*Path(f"/proc/{pid}/fd").iterdir()])
        status = Path(f"/proc/{pid}/status").read_text().splitlines()
        memory = next(int(line.split()[1]) for line in status if line.startswith("VmRSS:"))
        self._first.setdefault(pid, (files, memory))
        before = self._most.get(pid, (0, 0))
        self._most[pid] = (max(files, before[0]), max(memory, before[1]))

    def found(self) -> list[str]:
        """What is wrong, when no agent lives any more."""
        grown = [
            (self._most[pid][0] - files, self._most[pid][1] - memory) for pid, (files, memory) in self._first.items()
        ]
        files, memory = (max((one[index] for one in grown), default=0) for index in (0, 1))
        print(f"agents seen: {len(grown)}; open files grew by {files} at most, memory by {memory >> 10} MiB")
        wrong = []
        if files > _MORE_FILES:
            wrong.append(f"an agent's open files grew by {files}")
        if memory > _MORE_MEMORY:
            wrong.append(f"an agent's memory grew by {memory >> 10} MiB")
        return wrong + self._left()

    def _left(self) -> list[str]:
        wrong = []
        for node in self._cluster.settings.node_names:
            init = init_of(self._cluster.settings.namespace(node))
            left = [path.name for path in Path(f"/proc/{init.pid}/root/dev/shm").iterdir()] if init is not None else []
            if len(left) > _DIRECTORIES:
                wrong.append(f"left in /dev/shm of {node}: {', '.join(sorted(left))}")
        return wrong
