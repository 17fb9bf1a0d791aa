"""How soon a leader that falls silent is followed when the run's records are in etcd."""

from __future__ import annotations

import itertools
import os
import signal
import tempfile
import time
from pathlib import Path

from slurm_elastic.rendezvous.records.etcd import EtcdServer
from tests.local.agents import allocation
from tests.local.waiting import eventually

_SIZE = 3
_job_ids = itertools.count(100)


def followed_after(etcd: EtcdServer) -> float:
    """Seconds from the moment at which the leader's agent stands still to the next round, which is of the others.

    Its connections stand, as those of a node without power do, so nothing but its silence tells. The agents are real;
    their workers wait.
    """
    # A run of its own each time: etcd still has the records of the one before.
    job_id = str(next(_job_ids))
    with tempfile.TemporaryDirectory() as directory, allocation(Path(directory), _SIZE, job_id=job_id) as nodes:
        # The default limits, which the tests' own replace.
        leader, *_ = nodes.start_all(f"--rdzv-endpoint={etcd.config}", PET_RDZV_CONF="")
        nodes.seen(0)
        began = time.monotonic()
        os.kill(leader.pid, signal.SIGSTOP)
        eventually(lambda: nodes.rounds() == 2, nodes.log)
        return time.monotonic() - began
