"""What happens to a training: a node dies, falls silent, leaves or joins."""

from __future__ import annotations

import enum
import os
import signal
import time
from pathlib import Path

from benchmarks.job import Job, wait
from tests.cluster.testbed import Cluster
from tests.cluster.testbed.processes import end, init_of

__all__ = ["Scenario"]

_NODE = "n4"
"""To whom it happens: not the first node, which hosts torchrun's store and leads ours."""


class Scenario(enum.Enum):
    """One event in the life of a training on the nodes n1 to n4."""

    KILLED = "node killed"
    SILENT = "node silent"
    LEAVES = "node leaves"
    JOINS = "node joins"

    @property
    def nodes_before(self) -> list[str]:
        """Who trains before the event."""
        return ["n1", "n2", "n3"] if self is Scenario.JOINS else ["n1", "n2", "n3", "n4"]

    @property
    def nodes_after(self) -> int:
        """How many train after it."""
        return 4 if self is Scenario.JOINS else 3

    def happen(self, cluster: Cluster, job: Job) -> float:
        """Let it happen; the moment, in seconds since 1970."""
        match self:
            case Scenario.KILLED:
                namespace = cluster.settings.namespace(_NODE)
                init = init_of(namespace)
                assert init is not None
                moment = time.time()
                os.kill(init.pid, signal.SIGKILL)
                end([namespace])
            case Scenario.SILENT:
                moment = time.time()
                cluster.cut(_NODE)
            case Scenario.LEAVES:
                agent = job.agent_on(_NODE)
                moment = time.time()
                os.kill(agent.pid, signal.SIGTERM)
            case Scenario.JOINS:
                job.start([_NODE])
                moment = _connected(cluster)
        return moment


def _connected(cluster: Cluster) -> float:
    """When the new node's agent opened its first connection to the first node's."""
    init = init_of(cluster.settings.namespace("n1"))
    assert init is not None
    tables = [Path(f"/proc/{init.pid}/net/{name}") for name in ("tcp", "tcp6")]
    # proc(5) /proc/net/tcp: an address is one number in hex, of the machine's byte order; a mapped one ends so.
    peer = "".join(f"{int(part):02X}" for part in reversed(cluster.settings.address(_NODE).split(".")))

    def connected() -> bool:
        rows = [line.split() for table in tables for line in table.read_text().splitlines()[1:]]
        return any(
            row[2].split(":")[0].endswith(peer) and row[3] == "01" and int(row[1].split(":")[1], 16) != _SLURMD
            for row in rows
        )

    if not wait(connected, limit=60.0, pause=0.005):
        raise RuntimeError(f"the agent on {_NODE} never connected")
    return time.time()


_SLURMD = 6818
"""Port of slurmd, which Slurm's own messages go to."""
