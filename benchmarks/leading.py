"""The product's agents without workers, each in a process of its own: the first leads, the second follows it.

A coordinator leads and is in no round. The benchmarks of agents in processes (:mod:`benchmarks.herd`) start one or two.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import signal
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.herd import Herd
from benchmarks.herd_process import no_report
from benchmarks.usage import Usage, cpu_seconds, usage
from slurm_elastic.descriptors import raise_limit
from slurm_elastic.rendezvous.connect import RendezvousConfig, connect
from slurm_elastic.rendezvous.membership.events import Interrupted
from slurm_elastic.rendezvous.options import RendezvousOptions
from slurm_elastic.rendezvous.records.api import open_records
from slurm_elastic.rendezvous.records.etcd.config import load_config
from slurm_elastic.rundir import RunDir, incarnation

GIVEN_LIMITS = (1024, 20000)
"""Soft and hard limit on open files with which the leader's process begins."""
LIMIT = 120.0
"""Seconds in which agents have to come."""
COORDINATOR = -1
RUN = "benchmark"
INCARNATION = incarnation(RUN, 0)


class LeadingAgent:
    """A process with the agent on node n<position>, or with a coordinator, of a run of `nodes` nodes."""

    def __init__(self, place: Path, nodes: int, position: int, etcd: str = "") -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self.run_dir = RunDir.for_run(place, RUN).open()
        self._process = context.Process(target=_lead, args=(other, place, nodes, position, etcd), daemon=True)

    def __enter__(self) -> LeadingAgent:
        self._process.start()
        self.port: int = self._pipe.recv()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._pipe.close()

    def pause(self) -> None:
        """Stop the process; its kernel goes on to accept connections, and to take in what is sent."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let the process go on after :meth:`pause`."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        """End the process as a node ends; its kernel goes on."""
        self._process.kill()
        self._process.join()

    def cpu(self) -> float:
        """User and system time of the process until now, in seconds."""
        return cpu_seconds(self._process.pid)

    def usage(self) -> Usage:
        """What the process uses now."""
        return usage(self._process.pid)


@contextlib.contextmanager
def running(
    size: int, *positions: int, etcd: str = "", report: Callable[[int], str] = no_report
) -> Iterator[tuple[Herd, list[LeadingAgent]]]:
    """A run of `size` nodes that no agent of the herd has come to yet, and its agents at these positions."""
    with contextlib.ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="benchmark-")))
        agents = [stack.enter_context(LeadingAgent(place, size, position, etcd)) for position in positions]
        herd = Herd(INCARNATION, agents[0].run_dir, size, etcd, report)
        stack.callback(herd.close)
        yield herd, agents


def _lead(pipe: Connection, place: Path, nodes: int, position: int, etcd: str) -> None:
    # What most login shells hand to Slurm; the rest is the product's own doing.
    resource.setrlimit(resource.RLIMIT_NOFILE, GIVEN_LIMITS)
    raise_limit()
    run_dir = RunDir.for_run(place, RUN).open()
    has_workers = position != COORDINATOR
    config = RendezvousConfig(
        run_id=RUN,
        run_dir=run_dir,
        records=open_records(run_dir, INCARNATION, load_config(etcd) if etcd else None, limit=60.0),
        restart_count=0,
        incarnation=INCARNATION,
        agent=f"n{position}/0.0/0" if has_workers else "coordinator/0.0/0",
        node=f"n{position}" if has_workers else "coordinator",
        position=position,
        address="127.0.0.1",
        local_world_size=8,
        role="default",
        expected_nodes=tuple(f"n{index}" for index in range(nodes)),
        min_nodes=1,
        max_nodes=2 * nodes,
        max_restarts=0,
        may_lead=position <= 0,
        leader_host="127.0.0.1",
        ports=(0,),
        options=RendezvousOptions(min_round_time=0.0),
        has_workers=has_workers,
    )
    coordination = connect(config, lambda decision: None)
    own = config.agent_info(29400)
    if has_workers:
        coordination.join(own)
    # Where a candidate listens for those that come when it leads.
    pipe.send(coordination._standby_port)
    while True:
        if isinstance(coordination.next_event(), Interrupted) and has_workers:
            coordination.join(own)
