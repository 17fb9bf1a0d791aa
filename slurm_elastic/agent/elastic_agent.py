"""The elastic agent of one node: starts, watches and stops the workers of each round.

A subclass of torch's LocalElasticAgent. What is torch's stays torch's: worker environment, log specs, error files,
events, metrics. What is replaced is the loop: torch's polls ten times a second and restarts only when its own workers
fail; this one sleeps until a worker ends, the leader says something or a signal comes.

The underscore names of LocalElasticAgent and SimpleElasticAgent that are used here were read in torch 2.13
(elastic/agent/server/api.py and local_elastic_agent.py) and are checked by tests/unit/agent/test_torch_hooks.py.
"""

from __future__ import annotations

import enum
import logging
import os
import select
import selectors
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.events import record as record_event
from torch.distributed.elastic.events.api import EventSource
from torch.distributed.elastic.multiprocessing import LogsSpecs, PContext
from torch.distributed.elastic.rendezvous.api import RendezvousGracefulExitError

from slurm_elastic.agent.environment import worker_environment
from slurm_elastic.agent.notices import Notices
from slurm_elastic.agent.root_cause import BY_WATCHDOG, last_words
from slurm_elastic.agent.warm import StartInterruptedError
from slurm_elastic.agent.watchdog import Watchdog, Watched
from slurm_elastic.agent.workers import Starter, WorkerProcesses
from slurm_elastic.errors import ExitCode
from slurm_elastic.rendezvous.coordination import Coordination, RecordsLost, Superseded
from slurm_elastic.rendezvous.member import LeaderLost, Unreachable
from slurm_elastic.rendezvous.membership import LeaveReason, Outcome, Reason, WorkerFailure
from slurm_elastic.rendezvous.messages import Ended, Interrupted, Placed, Waiting
from slurm_elastic.rendezvous.seat import Seat
from slurm_elastic.rendezvous.worker_store import ReservedPort, open_worker_store

__all__ = ["AgentOutcome", "SlurmElasticAgent"]

logger = logging.getLogger("slurm_elastic")

_UNPLANNED = frozenset({Reason.NODE_LOST, Reason.WORKER_FAILED})
_UNPLANNED_STOP_TIMEOUT = 2.0
"""Seconds for workers whose group is broken: they block in a collective with a peer that is gone, and a Python signal
handler does not run while they do. What they hold in memory is of no use to anybody any more."""


@dataclass(frozen=True, slots=True)
class AgentOutcome:
    """How this agent ended.

    Attributes:
        exit_code: for Slurm.
        failure: the run's root cause, if it failed.
        detail: one line, if there is something to say.
    """

    exit_code: ExitCode
    failure: WorkerFailure | None = None
    detail: str = ""


class _Doing(enum.Enum):
    JOINING = enum.auto()
    TRAINING = enum.auto()
    DONE = enum.auto()
    """The workers ended well, or failed and that was reported: the leader's word is awaited."""
    STOPPING = enum.auto()


class SlurmElasticAgent(LocalElasticAgent):
    """One node's agent.

    Args:
        spec: torch's description of the workers.
        logs_specs: where their output goes.
        seat: of this agent in the run.
        coordination: in touch with the leader, or about to be.
        notices: the signals that came so far.
        starter: starts the processes of a round.
        watchdog: finds workers that hang; not started. None for none.
        shutdown_timeout: seconds that workers get between SIGTERM and SIGKILL when a round ends as planned.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        logs_specs: LogsSpecs,
        seat: Seat,
        coordination: Coordination,
        notices: Notices,
        starter: Starter,
        *,
        watchdog: Watchdog | None = None,
        shutdown_timeout: int = 30,
    ) -> None:
        super().__init__(spec, logs_specs, shutdown_timeout=shutdown_timeout)
        self._seat, self._coordination, self._notices, self._starter = seat, coordination, notices, starter
        self._watchdog = watchdog
        self._doing = _Doing.JOINING
        self._processes: WorkerProcesses | None = None
        self._placed: Placed | None = None
        self._reserved: ReservedPort | None = None
        self._round_store: TCPStore | None = None
        self._result = RunResult(state=WorkerState.HEALTHY)
        self._after_stop: Callable[[], RunResult | None] = self._join
        self._stop_by = 0.0
        self._told_to_go = False
        self.outcome = AgentOutcome(ExitCode.FAILED)

    def supervise(self) -> AgentOutcome:
        """Take part in the run until it ends or this agent leaves."""
        if self._watchdog is not None:
            self._watchdog.start(self._log_watchdog_event)
        self.run(self._worker_group.spec.role)
        return self.outcome

    def _invoke_run(self, role: str = "default") -> RunResult:
        if self._notices.first() is None:
            self._join()
        while True:
            self._sleep()
            result = self._act()
            if result is not None:
                return result

    # One turn of the loop.

    def _sleep(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._coordination.fd, selectors.EVENT_READ)
            selector.register(self._notices.fd, selectors.EVENT_READ)
            timeout, fds = None, []
            if self._doing is _Doing.STOPPING:
                timeout = 0.0 if self._all_ended() else max(0.0, self._stop_by - time.monotonic())
                fds = self._processes.running_fds() if self._processes is not None else []
            elif self._processes is not None:
                fds = self._processes.exit_fds()
            for fd in fds:
                selector.register(fd, selectors.EVENT_READ)
            selector.select(timeout)

    def _act(self) -> RunResult | None:
        self._notices.drain()
        # Signals first: under proctrack/linuxproc Slurm signals the workers in the same moment, and their end must
        # not be mistaken for a failure.
        if self._notices.first() is not None and not self._told_to_go:
            self._told_to_go = True
            self._leave(LeaveReason.PREEMPTED)
        if self._doing is _Doing.STOPPING:
            return self._stopped() if self._all_ended() or time.monotonic() >= self._stop_by else self._obey()
        result = self._obey()
        if result is None and self._doing is _Doing.TRAINING:
            self._look_at_workers()
        elif self._doing is _Doing.DONE:
            # Takes note of workers that end after the first one failed; they would wake the loop again and again.
            self._all_ended()
        return result

    def _obey(self) -> RunResult | None:
        match self._coordination.next_word(timeout=0):
            case Interrupted() | LeaderLost() if self._told_to_go:
                # All agents of a job are told to go in one moment, so each also hears that the others do. The workers
                # keep the time that they were given.
                pass
            case Placed() as placed if self._doing is _Doing.JOINING:
                self._start_round(placed)
            case Interrupted(reason=reason):
                self._stop(self._join, _UNPLANNED_STOP_TIMEOUT if reason in _UNPLANNED else self._shutdown_timeout)
            case Waiting():
                logger.info("%s waits as a spare", self._seat.node)
            case Ended() as ended:
                return self._ended(ended)
            case LeaderLost(why):
                return self._give_up(ExitCode.LEFT, f"the leader on {self._seat.leader_host} is lost: {why}")
            case Unreachable(why, usage):
                code = ExitCode.USAGE if usage else ExitCode.LEFT
                return self._give_up(code, f"no leader of run {self._seat.run_id} on {self._seat.leader_host}: {why}")
            case RecordsLost(why):
                return self._give_up(ExitCode.LEFT, why)
            case Superseded(why):
                return self._give_up(ExitCode.FENCED, why)
            case _:
                pass
        return None

    # Rounds.

    def _join(self) -> RunResult | None:
        self._doing = _Doing.JOINING
        self._placed = None
        self._round_store = None
        self._reserved = ReservedPort()
        self._coordination.join(self._seat.candidate(self._reserved.port))
        return None

    def _start_round(self, placed: Placed) -> None:
        assert self._reserved is not None
        self._placed = placed
        self._round_store = open_worker_store(placed, self._reserved)
        # torch annotates these attributes as None (elastic/agent/server/api.py, 2.13).
        group: Any = self._worker_group
        place = placed.place
        group.store = self._round_store
        group.group_rank, group.group_world_size = place.rank, placed.nodes
        group.master_addr, group.master_port = placed.store_address, placed.store_port
        group.workers = [
            Worker(
                local_rank=local_rank,
                global_rank=place.base_rank + local_rank,
                role_rank=place.role_base_rank + local_rank,
                world_size=placed.world_size,
                role_world_size=place.role_world_size,
            )
            for local_rank in range(place.local_world_size)
        ]
        # One number for the run, the same on every node, whichever of them failed.
        self._remaining_restarts = group.spec.max_restarts - placed.restarts
        try:
            pids = self._start_workers(group)
        except StartInterruptedError:
            self._doing = _Doing.DONE
            return
        except OSError as error:
            # A program that cannot be run here, such as one whose interpreter is missing: a worker that fails at once,
            # with the exit code of a shell.
            failure = WorkerFailure(self._seat.agent, self._seat.node, place.base_rank, 127, str(error))
            self._coordination.worker_failed(failure)
            self._doing = _Doing.DONE
            return
        for local_rank, pid in pids.items():
            group.workers[local_rank].id = pid
            event = self._construct_event("START", EventSource.WORKER, group.workers[local_rank])
            record_event(event, group.spec.event_log_handler)
        group.state = WorkerState.HEALTHY
        self._doing = _Doing.TRAINING

    def _start_workers(self, worker_group: object) -> dict[int, int]:
        assert self._placed is not None
        spec = self._worker_group.spec
        envs = {
            worker.local_rank: worker_environment(spec, worker, self._placed, self._seat, os.environ)
            for worker in self._worker_group.workers
        }
        for local_rank, env in envs.items():
            self._set_local_rank_env(cast(dict[str, str | None], env), local_rank, spec)
        if self._watchdog is not None:
            for env in envs.values():
                env[self._watchdog.variable] = self._watchdog.path
            self._watchdog.expect()
        self._processes = self._starter(spec, envs, self._something_else_came)
        # For torch's _monitor_workers.
        self._pcontext = cast(PContext, self._processes)
        pids = self._processes.pids()
        if self._watchdog is not None:
            self._watchdog.watch(_watched(pids, envs, self._placed.round))
        return pids

    def _something_else_came(self) -> bool:
        words, _, _ = select.select([self._coordination.fd], [], [], 0)
        return bool(words) or self._notices.first() is not None

    def _look_at_workers(self) -> None:
        assert self._placed is not None
        result = self._monitor_workers(self._worker_group)
        if result.state is WorkerState.SUCCEEDED:
            logger.debug("the workers of %s have ended well; it waits for the others", self._seat.node)
            self._coordination.finished()
        elif result.state in (WorkerState.FAILED, WorkerState.UNHEALTHY):
            self._coordination.worker_failed(self._first_failure(result))
        else:
            return
        self._worker_group.state = result.state
        self._result = result
        self._doing = _Doing.DONE

    def _first_failure(self, result: RunResult) -> WorkerFailure:
        assert self._placed is not None
        seat = self._seat
        if not result.failures:
            return WorkerFailure(seat.agent, seat.node, self._placed.place.base_rank, 1, "a worker cannot be stopped")
        rank, failure = min(result.failures.items(), key=lambda item: item[1].timestamp)
        log = self._processes.stderr_of(failure.local_rank) if self._processes is not None else ""
        hang = self._watchdog.hang_of(failure.pid) if self._watchdog is not None else None
        return WorkerFailure(
            agent=seat.agent,
            node=seat.node,
            rank=rank,
            exit_code=failure.exitcode,
            message=f"{BY_WATCHDOG}{hang}" if hang is not None else last_words(str(failure.error_file), log),
            error_file=str(failure.error_file),
            log=log,
        )

    # Stopping and going.

    def _stop(self, then: Callable[[], RunResult | None], timeout: float) -> None:
        """Tell the workers to end, and do `then` when they have, or when `timeout` seconds are over."""
        self._after_stop = then
        by = time.monotonic() + timeout
        self._stop_by = min(self._stop_by, by) if self._doing is _Doing.STOPPING else by
        if self._watchdog is not None:
            self._watchdog.unwatch()
        if self._doing is not _Doing.STOPPING and self._processes is not None:
            self._processes.signal(signal.SIGTERM)
        self._doing = _Doing.STOPPING

    def _all_ended(self) -> bool:
        return self._processes is None or self._processes.all_ended()

    def _stopped(self) -> RunResult | None:
        if self._processes is not None:
            self._processes.close(signal.SIGKILL)
            self._processes = self._pcontext = None
        return self._after_stop()

    def _leave(self, reason: LeaveReason) -> None:
        received = self._notices.first()
        name = received.signal.name if received is not None else reason.value
        logger.info("%s got %s: leaving round %s", self._seat.node, name, self._placed.round if self._placed else "-")
        self._coordination.leaving(reason)

        def go() -> RunResult:
            self._coordination.left(reason)
            self.outcome = AgentOutcome(ExitCode.LEFT, detail=f"left after {name}")
            raise RendezvousGracefulExitError(self.outcome.detail)

        self._stop(go, self._shutdown_timeout)

    def _give_up(self, code: ExitCode, detail: str) -> RunResult | None:
        def go() -> RunResult:
            self.outcome = AgentOutcome(code, detail=detail)
            raise RendezvousGracefulExitError(detail)

        self._told_to_go = True
        self._stop(go, _UNPLANNED_STOP_TIMEOUT)
        return None

    def _ended(self, ended: Ended) -> RunResult | None:
        succeeded = ended.outcome in (Outcome.SUCCEEDED, Outcome.CLOSED)
        code = ExitCode.FINISHED if succeeded else ExitCode.FAILED
        if ended.outcome is Outcome.TIMED_OUT and self._placed is not None:
            code = ExitCode.LEFT
        self._told_to_go = True

        def end() -> RunResult:
            self.outcome = AgentOutcome(code, ended.failure, ended.detail)
            if succeeded and self._result.state is WorkerState.SUCCEEDED:
                return self._result
            if not succeeded and self._placed is not None:
                return RunResult(state=WorkerState.FAILED, failures=self._result.failures)
            raise RendezvousGracefulExitError(ended.detail or ended.outcome.value)

        self._stop(end, _UNPLANNED_STOP_TIMEOUT)
        return None

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        """Called by torch's run() at the very end, whatever happened."""
        if self._watchdog is not None:
            self._watchdog.stop()
        if self._reserved is not None:
            self._reserved.close()
        if self._processes is not None:
            self._processes.close(death_sig, timeout)
            self._processes = self._pcontext = None


def _watched(pids: dict[int, int], envs: dict[int, dict[str, str]], round_: int) -> list[Watched]:
    """The workers of a round, for the watchdog. The logs specs have put the path of the error file beside the logs."""
    return [
        Watched(pid, int(envs[rank]["RANK"]), rank, round_, Path(error).parent if error else None)
        for rank, pid in pids.items()
        for error in [envs[rank].get("TORCHELASTIC_ERROR_FILE")]
    ]
