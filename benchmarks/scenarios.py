"""What happens to a training: a node dies, falls silent, leaves or joins, or its job is requeued."""

from __future__ import annotations

import enum
import os
import signal
import subprocess
import sys
import threading
import time

from benchmarks.history import Recovery, recovery
from benchmarks.job import Job, wait
from tests.cluster.testbed import Cluster, network
from tests.cluster.testbed.processes import end, init_of

_NODE = "n4"
"""To whom it happens: not the first node, which hosts torchrun's store and leads ours."""
_START_LIMIT = 60.0


class Scenario(enum.Enum):
    """One event in the life of a training on the nodes n1 to n4."""

    KILLED = "node killed"
    SILENT = "node silent"
    LEAVES = "node leaves"
    JOINS = "node joins"
    REQUEUED = "job requeued"

    @property
    def nodes_before(self) -> list[str]:
        """Who trains before the event."""
        return ["n1", "n2", "n3"] if self is Scenario.JOINS else ["n1", "n2", "n3", "n4"]

    @property
    def nodes_after(self) -> int:
        """How many train after it."""
        return 4 if self in (Scenario.JOINS, Scenario.REQUEUED) else 3

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
                moment = _join(cluster, job)
            case Scenario.REQUEUED:
                moment = time.time()
                job.requeue()
                job.start(self.nodes_before)
        return moment

    def recover(self, cluster: Cluster, job: Job, limit: float) -> tuple[float, Recovery | None]:
        """Let it happen; the moment, and what it cost if the nodes train again within `limit` seconds."""
        moment = self.happen(cluster, job)
        wait(lambda: recovery(job.workers(), moment, self.nodes_after) is not None, limit)
        return moment, recovery(job.workers(), moment, self.nodes_after)


def _join(cluster: Cluster, job: Job) -> float:
    """Start an agent on the new node; when it opened its first connection to the first node."""
    namespace = network.NAMESPACES / cluster.settings.namespace("n1")
    program = [sys.executable, "-m", "benchmarks.first_connection", cluster.settings.address(_NODE)]
    with subprocess.Popen(["nsenter", f"--net={namespace}", *program], stdout=subprocess.PIPE, text=True) as watch:
        assert watch.stdout is not None
        watch.stdout.readline()
        job.start([_NODE])
        late = threading.Timer(_START_LIMIT, watch.kill)
        late.start()
        moment = watch.stdout.readline()
        late.cancel()
    if not moment:
        raise RuntimeError(f"the agent on {_NODE} did not connect within {_START_LIMIT:.0f} s")
    return float(moment)
