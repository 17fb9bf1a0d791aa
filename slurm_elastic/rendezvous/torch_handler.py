"""The rendezvous as torch's RendezvousHandler, for ``torchrun --rdzv-backend=slurm`` and users of torch's own agent.

Without this project's agent the leader learns of no failed workers; torch's agent joins again after a failure, and
asks :meth:`SlurmRendezvousHandler.num_nodes_waiting` whether the membership has to change.
"""

from __future__ import annotations

import logging
import os
import secrets
import sys
from datetime import timedelta
from pathlib import Path

from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from slurm_elastic.environment import take_private
from slurm_elastic.errors import RecordsError
from slurm_elastic.rendezvous import worker_store
from slurm_elastic.rendezvous.connect import RendezvousConfig, connect
from slurm_elastic.rendezvous.election.events import LeaderEvent, LeaderLost, RecordsLost, Unreachable
from slurm_elastic.rendezvous.membership.agents import AgentIdentity, LeaveReason
from slurm_elastic.rendezvous.membership.events import Closed, Decision, Ended, Interrupted, Left, Outcome, Waiting
from slurm_elastic.rendezvous.options import RendezvousOptions
from slurm_elastic.rendezvous.records.api import etcd_wanted, open_records
from slurm_elastic.rendezvous.run_events import describe
from slurm_elastic.rendezvous.thread import Coordination
from slurm_elastic.rendezvous.transport.messages import Assignment
from slurm_elastic.rundir import RunDir, incarnation, join_own
from slurm_elastic.slurm import (
    AddressPreference,
    Controller,
    SlurmJob,
    choose_address,
    ephemeral_low,
    gather_facts,
    port_sequence,
)

logger = logging.getLogger(__name__)

_BACKEND = "slurm"
_SIGNAL_LATENCY = 0.2
_STORE_TIMEOUT = timedelta(seconds=60)


class _RoundStore(TCPStore):
    """A client of a round's store; while it is kept, the store that this agent serves for it is, too."""

    served: worker_store.ServedStore | None = None


class SlurmRendezvousHandler(RendezvousHandler):
    """torch's rendezvous interface over the project's membership."""

    def __init__(self, config: RendezvousConfig, coordination: Coordination) -> None:
        self._config = config
        self._coordination = coordination
        self._store: Store | None = None
        self._ports = worker_store.FreshPorts(config.address)
        self._served: worker_store.ServedStore | None = None
        self._reserved: worker_store.ReservedPort | None = None
        self._interrupted = False
        self._end: RendezvousError | None = None
        self._finished = False

    def get_backend(self) -> str:
        """``slurm``."""
        return _BACKEND

    def get_run_id(self) -> str:
        """The run's id: that of the job or of its array, unless one was given."""
        return self._config.run_id

    @property
    def use_agent_store(self) -> bool:
        """True: every round has a fresh store, which the agent of rank 0 serves to the workers."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Join and wait for a place; see torch's RendezvousHandler for the errors."""
        self._raise_if_over()
        self._store = self._served = None
        self._reserved = self._ports.reserve()
        self._coordination.join(self._config.agent_info(self._reserved.port))
        while True:
            # A signal handler that raises has to get its turn, so no wait is longer than this.
            event = self._coordination.next_event(timeout=_SIGNAL_LATENCY)
            if isinstance(event, Assignment):
                return self._placed(event)
            if event is not None:
                self._note(event)
                self._raise_if_over()

    def is_closed(self) -> bool:
        """Return whether the run has ended for all agents."""
        self._listen()
        return isinstance(self._end, RendezvousClosedError | RendezvousGracefulExitError)

    def set_closed(self) -> None:
        """End the run for all agents."""
        self._coordination.send(Closed(self._config.agent))
        self._end = self._end or RendezvousClosedError("the run was closed from here")

    def num_nodes_waiting(self) -> int:
        """1 when the round is over for whatever reason, so that torch's agent restarts its workers; else 0."""
        self._listen()
        if self._end is not None and not self._finished:
            raise self._end
        return int(self._interrupted)

    def shutdown(self) -> bool:
        """Leave; when all members of a round have left like this, the run is finished.

        torch's launch_agent (launcher/api.py, 2.13) comes here in a ``finally`` also when the workers failed for good
        or the agent broke down. Then the run is closed for all agents, as by torch's own handler.
        """
        if self._reserved is not None:
            self._reserved.close()
        if sys.exc_info()[0] is not None and self._end is None:
            self.set_closed()
        self._coordination.send(Left(self._config.agent, LeaveReason.FINISHED))
        self._coordination.stop()
        self._config.records.close()
        self._served = None
        return True

    def _placed(self, placed: Assignment) -> RendezvousInfo:
        assert self._reserved is not None
        # Whatever ended before concerns earlier rounds.
        self._interrupted = False
        served = worker_store.open_worker_store(placed, self._reserved)
        self._store = _RoundStore(
            placed.store_address, placed.store_port, is_master=False, wait_for_workers=False, timeout=_STORE_TIMEOUT
        )
        self._store.served = self._served = served
        address = RendezvousStoreInfo(placed.store_address, placed.store_port)
        return RendezvousInfo(self._store, placed.place.rank, placed.nodes, address)

    def _listen(self) -> None:
        while (event := self._coordination.next_event(timeout=0)) is not None:
            self._note(event)

    def _note(self, event: LeaderEvent | RecordsLost) -> None:
        match event:
            case Interrupted():
                logger.info("round %d ends: %s %s", event.round, event.reason.value, event.node)
                self._interrupted = True
            case Ended(outcome=Outcome.SUCCEEDED):
                self._finished = True
                self._end = RendezvousGracefulExitError("the run is finished")
            case Ended(outcome=Outcome.TIMED_OUT, detail=detail):
                self._end = RendezvousTimeoutError(detail)
            case Ended(detail=detail):
                self._end = RendezvousClosedError(f"the run was closed: {detail}")
            case LeaderLost(why):
                self._end = RendezvousConnectionError(f"the leader on {self._config.leader_host} is lost: {why}")
            case Unreachable(why):
                self._end = RendezvousConnectionError(f"no leader on {self._config.leader_host}: {why}")
            case RecordsLost(why):
                self._end = RendezvousConnectionError(why)
            case Waiting():
                logger.info("waiting as a spare")
            case _:
                pass

    def _raise_if_over(self) -> None:
        if self._end is not None:
            raise self._end


def handler_factory() -> object:
    """Return what torch's entry-point group ``torchrun.handlers`` asks for (rendezvous/registry.py, torch 2.13)."""
    return create_handler


def create_handler(params: RendezvousParameters) -> SlurmRendezvousHandler:
    """Make a handler from torchrun's parameters; everything that is not given comes from Slurm.

    Raises:
        UsageError: a wrong option, or SLURM variables that contradict each other.
        RendezvousConnectionError: the run directory or the records of the run cannot be used.
    """
    worker_store.prepare_stores()
    job = SlurmJob.from_environment(os.environ)
    # torchrun's own default of --rdzv-id is the word "none" (torch 2.13, run.py).
    asked_id = params.run_id if params.run_id != "none" else ""
    base = job.submit_dir if job is not None and job.submit_dir is not None else Path.cwd()
    node = job.node if job is not None else "localhost"
    leader = job.nodes[0] if job is not None else "localhost"
    may_lead = job is None or job.node_rank == 0
    address = "127.0.0.1"
    if job is not None:
        preference = AddressPreference(local_addr=params.local_addr)
        address = choose_address(preference, gather_facts(preference, node, toward=leader, controller=Controller()))
    restart_count = job.restart_count if job is not None else 0
    options = RendezvousOptions.from_config(params.config)
    least, most = options.node_range(params.min_nodes, params.max_nodes)
    etcd = etcd_wanted(params.endpoint, params.config, {**os.environ, **take_private(os.environ)})
    try:
        if job is not None and not asked_id:
            run_dir = join_own(base, job, _command(sys.argv))
        else:
            run_dir = RunDir.for_run(base, asked_id or f"local-{secrets.token_hex(4)}").open()
        own = incarnation(run_dir.run_id, 0 if asked_id else restart_count)
        records = open_records(run_dir, own, etcd, limit=options.etcd_limit)
    except RecordsError as error:
        raise RendezvousConnectionError(str(error)) from error
    config = RendezvousConfig(
        run_id=run_dir.run_id,
        run_dir=run_dir,
        records=records,
        restart_count=restart_count,
        incarnation=own,
        agent=str(AgentIdentity(node, job.job_id if job is not None else "0", restart_count, os.getpid())),
        node=node,
        position=job.position if job is not None else 0,
        address=address,
        local_world_size=1,
        role="default",
        expected_nodes=job.nodes if job is not None and not (asked_id and job.array) else (node,),
        min_nodes=least,
        max_nodes=most,
        # torch's agent counts worker failures, and joins again after each.
        max_restarts=0,
        may_lead=may_lead,
        leader_host=leader if job is not None else "127.0.0.1",
        ports=port_sequence(
            run_dir.run_id, restart_count, ephemeral_low(), job.reserved_ports if job is not None else ()
        ),
        options=options,
        cohort=job.cohort if job is not None else ("", 1),
        domain=job.failure_domain if job is not None else "",
    )
    return SlurmRendezvousHandler(config, connect(config, _log))


def _command(words: list[str]) -> list[str]:
    """Return the script and its arguments; torchrun's own options may differ from node to node."""
    if Path(words[0]).name not in ("torchrun", "run.py"):
        return words
    from torch.distributed.run import parse_args

    options = parse_args(words[1:])  # type: ignore[no-untyped-call]
    return [options.training_script, *options.training_script_args]


def _log(decision: Decision) -> None:
    entry = describe(decision)
    if entry is not None:
        logger.info("%s", entry.text)
