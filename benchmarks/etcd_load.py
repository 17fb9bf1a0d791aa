"""What a run asks of etcd, and how soon a leader that falls silent is followed when the records are there."""

from __future__ import annotations

import itertools
import os
import re
import signal
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from slurm_elastic.rendezvous.records.etcd.records import EtcdRecords
from slurm_elastic.rendezvous.records.etcd.server import EtcdServer
from slurm_elastic.rundir import RunDir
from tests.local.agents import Allocation, allocation
from tests.local.waiting import eventually

_CONNECTIONS = 16
_STARTED = re.compile(r"^grpc_server_started_total\{.*\} ([0-9.e+]+)$", re.MULTILINE)
_LIMIT = 60.0
SETTLING = 1.0
"""Seconds after the start of the last worker until a start, or a change, counts as over."""
_job_ids = itertools.count(500)


class Newcomers:
    """The etcd clients of agents that start, few for all: one process cannot bear a thousand.

    Each asks what agents ask when they start, by the same calls.
    """

    def __init__(self, etcd: EtcdServer, run_dir: RunDir, incarnation: str) -> None:
        self._stack = ExitStack()
        self._records = [_open(self._stack, etcd, run_dir, incarnation) for _ in range(_CONNECTIONS)]

    def ask(self, index: int) -> int:
        """The port of the leader, for the agent of this number."""
        records = self._records[index % _CONNECTIONS]
        records.enter(_LIMIT)
        if records.is_done():
            return 0
        place = records.situation().endpoint
        return 0 if place is None else int(place["port"])

    def __enter__(self) -> Newcomers:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def steady_rate(etcd: EtcdServer, run_dir: RunDir, incarnation: str, agents: int, seconds: float) -> float:
    """Requests that reach etcd per agent and second while nothing happens; one of the agents has led and writes."""
    with ExitStack() as stack:
        agents_records = [_open(stack, etcd, run_dir, incarnation) for _ in range(agents)]
        agents_records[0].claim_epoch(1, {})
        agents_records[0].publish_endpoint({"address": "127.0.0.1", "port": 1})
        before = _requests(etcd)
        time.sleep(seconds)
        return (_requests(etcd) - before) / agents / seconds


def requests_by_phase(etcd: EtcdServer, size: int) -> dict[str, float]:
    """Requests that reach etcd in a run of real agents with one worker each: start, change and end, of all agents.

    Start: until all workers run. Change: one agent that does not lead is killed, until the others' workers run again.
    End: from the end of the workers on.
    """
    with _run(size) as nodes:
        counts = [_requests(etcd)]
        nodes.start_all(f"--rdzv-endpoint={etcd.config}", PET_RDZV_CONF="")
        for round_ in (0, 1):
            nodes.seen(round_)
            time.sleep(SETTLING)
            counts.append(_requests(etcd))
            if round_ == 0:
                next(agent for agent in nodes.agents if agent.node != nodes.leader()).kill()
        nodes.touch("finish")
        for agent in nodes.agents:
            agent.wait()
        counts.append(_requests(etcd))
    phases = zip(("start", "change", "end"), counts[:-1], counts[1:], strict=True)
    return {phase: after - before for phase, before, after in phases}


def followed_after(etcd: EtcdServer) -> float:
    """Seconds from the moment at which the leader's agent stands still to the next round, which is of the two others.

    Its connections stand, as those of a node without power do, so nothing but its silence tells. The agents are real;
    their workers wait.
    """
    with _run(3) as nodes:
        # The default limits, which the tests' own replace.
        leader, *_ = nodes.start_all(f"--rdzv-endpoint={etcd.config}", PET_RDZV_CONF="")
        nodes.seen(0)
        began = time.monotonic()
        os.kill(leader.pid, signal.SIGSTOP)
        eventually(lambda: nodes.rounds() == 2, nodes.log)
        return time.monotonic() - began


@contextmanager
def _run(size: int) -> Iterator[Allocation]:
    """A run of its own each time: etcd still has the records of the one before."""
    job_id = str(next(_job_ids))
    with tempfile.TemporaryDirectory() as directory, allocation(Path(directory), size, job_id=job_id) as nodes:
        yield nodes


def _open(stack: ExitStack, etcd: EtcdServer, run_dir: RunDir, incarnation: str) -> EtcdRecords:
    records = EtcdRecords(etcd.config, run_dir, incarnation, limit=_LIMIT)
    stack.callback(records.close)
    return records


def _requests(etcd: EtcdServer) -> float:
    """How many calls etcd has been asked for, by its own count."""
    with urllib.request.urlopen(f"http://{etcd.config.endpoints[0]}/metrics", timeout=10) as answer:
        return sum(map(float, _STARTED.findall(answer.read().decode())))
