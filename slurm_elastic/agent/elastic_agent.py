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
from typing import Any, cast

from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.events import record as record_event
from torch.distributed.elastic.events.api import EventSource
from torch.distributed.elastic.multiprocessing import LogsSpecs, PContext
from torch.distributed.elastic.rendezvous.api import RendezvousGracefulExitError

from slurm_elastic.agent.agreement import StepAgreement
from slurm_elastic.agent.departure import Departure, depart
from slurm_elastic.agent.environment import worker_environment
from slurm_elastic.agent.health import Reporter, Stage
from slurm_elastic.agent.inquiry import Inquiry
from slurm_elastic.agent.notices import Notices
from slurm_elastic.agent.places import place_of, slowest, survivors, watched
from slurm_elastic.agent.reasons import concerns_job, leave_reason, wish_of
from slurm_elastic.agent.root_cause import BY_WATCHDOG, last_words
from slurm_elastic.agent.warm import StartInterruptedError
from slurm_elastic.agent.watchdog import Watchdog
from slurm_elastic.agent.workers import Starter, WorkerProcesses
from slurm_elastic.control import WorkerProgress
from slurm_elastic.errors import ExitCode
from slurm_elastic.rendezvous.coordination import Coordination, RecordsLost
from slurm_elastic.rendezvous.member import LeaderLost, Unreachable
from slurm_elastic.rendezvous.membership import LeaveReason, Outcome, Reason, WorkerFailure
from slurm_elastic.rendezvous.messages import Ended, Holding, Interrupted, Placed, Stopping, Waiting
from slurm_elastic.rendezvous.requests import LeaveRequested, job_of
from slurm_elastic.rendezvous.seat import Seat
from slurm_elastic.rendezvous.worker_store import ReservedPort, open_worker_store

__all__ = ["AgentOutcome", "SlurmElasticAgent"]

logger = logging.getLogger("slurm_elastic")

_UNPLANNED = frozenset({Reason.NODE_LOST, Reason.WORKER_FAILED})
_UNPLANNED_STOP_TIMEOUT = 0.5
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
    GIVEN_UP = enum.auto()
    """The start of the workers was given up for something else that came: the leader's word is awaited."""
    STOPPING = enum.auto()
    LINGERING = enum.auto()
    """The workers have stopped at the agreed step, and this agent leaves when the others have, too: it serves their
    store, or leads."""


class SlurmElasticAgent(LocalElasticAgent):
    """One node's agent.

    Args:
        spec: torch's description of the workers.
        logs_specs: where their output goes.
        seat: of this agent in the run.
        coordination: in touch with the leader, or about to be.
        notices: the signals that came so far.
        inquiry: finds out what they mean.
        starter: starts the processes of a round.
        reporter: told what this agent is doing.
        watchdog: finds workers that hang; not started. None for none.
        shutdown_timeout: seconds that workers get between SIGTERM and SIGKILL when a round ends as planned.
        worker_signal: sent to workers when a planned end of their round is announced. None for none.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        logs_specs: LogsSpecs,
        seat: Seat,
        coordination: Coordination,
        notices: Notices,
        inquiry: Inquiry,
        starter: Starter,
        reporter: Reporter,
        *,
        watchdog: Watchdog | None = None,
        shutdown_timeout: int = 30,
        worker_signal: signal.Signals | None = None,
    ) -> None:
        super().__init__(spec, logs_specs, shutdown_timeout=shutdown_timeout)
        self._seat, self._coordination, self._starter = seat, coordination, starter
        self._notices, self._inquiry = notices, inquiry
        self._reporter, self._watchdog, self._worker_signal = reporter, watchdog, worker_signal
        self._agreement = StepAgreement()
        self._doing = _Doing.JOINING
        self._processes: WorkerProcesses | None = None
        self._placed: Placed | None = None
        self._reserved: ReservedPort | None = None
        self._round_store: TCPStore | None = None
        self._result = RunResult(state=WorkerState.HEALTHY)
        self._after_stop: Callable[[], RunResult | None] = self._join
        self._stop_by = 0.0
        self._terminate_at: float | None = None
        self._told_to_go = False
        self._departure: Departure | None = None
        self._last_checkpoint: int | None = None
        self._signalled = self._as_agreed = self._said_farewell = False
        self.outcome = AgentOutcome(ExitCode.FAILED)
        coordination.slowest = lambda: slowest(self._placed, self.progress())

    def supervise(self) -> AgentOutcome:
        """Take part in the run until it ends or this agent leaves."""
        if self._watchdog is not None:
            self._watchdog.start(self._log_watchdog_event)
        self.run(self._worker_group.spec.role)
        return self.outcome

    def progress(self) -> tuple[WorkerProgress, ...]:
        """How far the workers here are, by local rank; from any thread."""
        return self._agreement.progress()

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
            selector.register(self._reporter.fd, selectors.EVENT_READ)
            selector.register(self._inquiry.fd, selectors.EVENT_READ)
            timeout, fds = self._time_left(), []
            if self._doing is _Doing.STOPPING:
                timeout = 0.0 if self._all_ended() else timeout
                fds = self._processes.running_fds() if self._processes is not None else []
            elif self._processes is not None:
                fds = self._processes.exit_fds()
            for fd in fds:
                selector.register(fd, selectors.EVENT_READ)
            selector.select(timeout)

    def _time_left(self) -> float | None:
        moment = None
        if self._doing is _Doing.STOPPING:
            moment = self._stop_by if self._terminate_at is None else min(self._stop_by, self._terminate_at)
        elif self._departure is not None:
            moment = self._departure.stop_by
        return None if moment is None else max(0.0, moment - time.monotonic())

    def _act(self) -> RunResult | None:
        self._notices.drain()
        self._reporter.answer()
        # Signals first: under proctrack/linuxproc Slurm signals the workers in the same moment, and their end must
        # not be mistaken for a failure.
        self._heed_signals()
        if self._doing is _Doing.STOPPING:
            if self._terminate_at is not None and time.monotonic() >= self._terminate_at:
                self._terminate()
            return self._stopped() if self._all_ended() or time.monotonic() >= self._stop_by else self._obey()
        result = self._obey()
        if result is None and self._doing is _Doing.TRAINING:
            result = self._look_at_workers()
        elif self._doing in (_Doing.DONE, _Doing.GIVEN_UP):
            # Takes note of workers that end after the first one failed; they would wake the loop again and again.
            self._all_ended()
        if self._departure is not None and time.monotonic() >= self._departure.stop_by:
            self._stop_for_departure()
        return result

    def _obey(self) -> RunResult | None:
        match self._coordination.next_word(timeout=0):
            case Interrupted() | LeaderLost() as word if self._told_to_go:
                # All agents of a job are told to go in one moment, so each also hears that the others do. The workers
                # keep the time that they were given, and those that know where to stop do so.
                if isinstance(word, Interrupted) or not self._knows_step():
                    self._stop_for_departure()
            case Holding(round_):
                self._hold(round_)
            case Stopping() as stopping:
                self._stop_at(stopping)
            case Placed() as placed if self._doing is _Doing.JOINING:
                self._start_round(placed)
            case Interrupted(reason=reason):
                planned = reason not in _UNPLANNED
                self._stop(self._join, self._shutdown_timeout if planned else _UNPLANNED_STOP_TIMEOUT, gently=planned)
            case LeaveRequested() as request:
                self._heed_request(request)
            case Waiting():
                logger.info("%s waits as a spare", self._seat.node)
                self._reporter.enter(Stage.SPARE)
            case Ended() as ended:
                return self._ended(ended)
            case LeaderLost(why):
                return self._give_up(ExitCode.LEFT, f"the leader on {self._seat.leader_host} is lost: {why}")
            case Unreachable(why, usage):
                code = ExitCode.USAGE if usage else ExitCode.LEFT
                return self._give_up(code, f"no leader of run {self._seat.run_id} on {self._seat.leader_host}: {why}")
            case RecordsLost(why):
                return self._give_up(ExitCode.LEFT, why)
            case _:
                pass
        return None

    # Rounds.

    def _join(self) -> RunResult | None:
        self._doing = _Doing.JOINING
        self._reporter.join()
        if not self._as_agreed and not self._signalled:
            # Else workers on other nodes may still be saving; then it is served until the next round.
            self._round_store = None
        self._placed = None
        self._reserved = ReservedPort()
        self._coordination.join(self._seat.candidate(self._reserved.port))
        return None

    def _start_round(self, placed: Placed) -> None:
        assert self._reserved is not None
        self._placed = placed
        self._signalled = self._as_agreed = False
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
            self._doing = _Doing.GIVEN_UP
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
        self._reporter.train(place_of(placed, pids), placed.restarts)

    def _start_workers(self, worker_group: object) -> dict[int, int]:
        assert self._placed is not None
        spec = self._worker_group.spec
        envs = {
            worker.local_rank: worker_environment(spec, worker, self._placed, self._seat, os.environ)
            for worker in self._worker_group.workers
        }
        self._agreement.open(self._placed.round, len(envs))
        for local_rank, env in envs.items():
            env.update(self._agreement.environment(local_rank))
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
            self._watchdog.watch(watched(pids, envs, self._placed.round), self._agreement.progress)
        return pids

    def _something_else_came(self) -> bool:
        self._reporter.answer()
        words, _, _ = select.select([self._coordination.fd], [], [], 0)
        return bool(words) or self._notices.first() is not None

    def _look_at_workers(self) -> RunResult | None:
        assert self._placed is not None
        result = self._monitor_workers(self._worker_group)
        if result.state is WorkerState.SUCCEEDED and (self._agreement.stopped() or self._signalled):
            return self._stopped_as_agreed()
        if result.state is not WorkerState.HEALTHY and self._departure is not None:
            # Whoever told this agent to go may have told its workers, too: that they end is no failure, and no success.
            self._stop_for_departure()
            return None
        if result.state is WorkerState.SUCCEEDED:
            logger.debug("the workers of %s have ended well; it waits for the others", self._seat.node)
            self._coordination.finished()
            self._reporter.enter(Stage.DONE)
        elif result.state in (WorkerState.FAILED, WorkerState.UNHEALTHY):
            self._coordination.worker_failed(self._first_failure(result))
            self._reporter.enter(Stage.FAILED)
        else:
            return None
        self._worker_group.state = result.state
        self._result = result
        self._doing = _Doing.DONE
        return None

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
            hung=hang is not None,
        )

    # Stopping and going.

    def _stop(self, then: Callable[[], RunResult | None], timeout: float, *, gently: bool = False) -> None:
        """Tell the workers to end, and do `then` when they have, or when `timeout` seconds are over.

        With `gently`, those that have got the signal for a planned end have the time for that first.
        """
        self._after_stop = then
        self._reporter.enter(Stage.LEAVING if self._told_to_go else Stage.STOPPING)
        by = time.monotonic() + timeout
        self._stop_by = min(self._stop_by, by) if self._doing is _Doing.STOPPING else by
        if self._watchdog is not None:
            self._watchdog.unwatch()
        if self._doing is not _Doing.STOPPING:
            if gently and self._signalled:
                self._terminate_at, self._stop_by = by, by + _UNPLANNED_STOP_TIMEOUT
            else:
                self._terminate()
        self._doing = _Doing.STOPPING

    def _terminate(self) -> None:
        self._terminate_at = None
        if self._processes is not None:
            self._processes.signal(signal.SIGTERM)

    def _all_ended(self) -> bool:
        return self._processes is None or self._processes.all_ended()

    def _stopped(self) -> RunResult | None:
        self._terminate_at = None
        self._close_round()
        return self._after_stop()

    def last_checkpoint(self) -> int | None:
        """The newest checkpoint that a worker here has reported, None if none did; from any thread."""
        steps = [worker.checkpoint for worker in self._agreement.progress() if worker.checkpoint is not None]
        return max(steps, default=self._last_checkpoint)

    def _close_round(self) -> None:
        self._last_checkpoint = self.last_checkpoint()
        if self._watchdog is not None:
            self._watchdog.unwatch()
        left: tuple[int, ...] = ()
        if self._processes is not None:
            self._processes.close(signal.SIGKILL)
            left = self._processes.left()
            self._processes = self._pcontext = None
        self._reporter.count(sum(worker.boundary for worker in self.progress()))
        self._agreement.close_round()
        if left:
            # Another round here would train beside them, and nobody is to take this node for a healthy one.
            self._coordination.left(LeaveReason.FAILED)
            self.outcome = AgentOutcome(ExitCode.FAILED, detail=survivors(self._seat.node, left))
            raise RendezvousGracefulExitError(self.outcome.detail)

    # The planned end of a round.

    def _leave(self, reason: LeaveReason, seconds: float | None = None, detail: str = "") -> None:
        """Announce that this agent has to be gone, in so many seconds if that is known; again when more is known."""
        again = self._departure is not None
        self._told_to_go = True
        self._reporter.notice(reason.value)
        detail = detail or reason.value
        self._departure = depart(
            reason,
            detail,
            seconds,
            shutdown_timeout=self._shutdown_timeout,
            margin=self._seat.options.leave_margin,
            now=time.monotonic(),
        )
        self._coordination.leaving(reason, self._shutdown_timeout if seconds is None else seconds)
        if self._doing is _Doing.TRAINING:
            # The leader asks all workers for a step at which to stop, or ends the round at once.
            self._signal_workers()
        elif not again:
            self._stop_for_departure()
        elif self._doing is _Doing.STOPPING:
            self._stop_by = min(self._stop_by, self._departure.gone_by)

    def _heed_signals(self) -> None:
        """Leave when signalled, and say more about it when more is known."""
        finding = self._inquiry.look()
        if finding is not None and not self._told_to_go:
            round_ = self._placed.round if self._placed else "-"
            logger.info("%s got %s: leaving round %s", self._seat.node, finding.detail, round_)
            self._leave(leave_reason(finding.cause), None, finding.detail)
        while (finding := self._inquiry.news()) is not None:
            if self._is_leaving():
                logger.info("%s leaves: %s", self._seat.node, finding)
                reason, detail = leave_reason(finding.cause), str(finding)
                self._leave(reason, finding.seconds, detail)
                if self._inquiry.asks and concerns_job(finding.cause):
                    self._coordination.request_leave(job_of(self._seat.agent), reason, finding.seconds, detail)

    def _heed_request(self, request: LeaveRequested) -> None:
        """Leave as the leader asks: a person wants it, or another agent of the job has found out why all have to go."""
        if self._told_to_go and not self._is_leaving():
            return
        self._inquiry.told(None if request.seconds is not None else wish_of(request.reason))
        if self._departure is not None and request.seconds is None:
            return
        logger.info("%s leaves: %s", self._seat.node, request.detail)
        self._leave(request.reason, request.seconds, request.detail)

    def _is_leaving(self) -> bool:
        """Whether this agent goes because it was told to, and not because the run has ended."""
        return self._departure is not None and self._after_stop in (self._join, self._go)

    def _hold(self, round_: int) -> None:
        if self._doing is _Doing.TRAINING:
            self._signal_workers()
            self._coordination.held(round_, self._agreement.hold())
        elif self._doing in (_Doing.GIVEN_UP, _Doing.STOPPING):
            self._coordination.held(round_, None)

    def _stop_at(self, word: Stopping) -> None:
        if self._doing is _Doing.TRAINING and not self._agreement.stop_at(word):
            self._coordination.held(word.round, None)

    def _knows_step(self) -> bool:
        return self._doing is _Doing.TRAINING and self._agreement.step is not None

    def _signal_workers(self) -> None:
        if self._worker_signal is not None and self._processes is not None and not self._signalled:
            self._signalled = True
            self._processes.signal(self._worker_signal)

    def _stopped_as_agreed(self) -> RunResult | None:
        """The workers have saved and ended at the agreed step, or by the signal that was sent to them."""
        assert self._placed is not None
        self._as_agreed = self._agreement.stopped()
        self._close_round()
        if self._departure is None:
            return self._join()
        others_stop = self._as_agreed and self._placed.nodes > 1
        if not others_stop or (self._round_store is None and not self._coordination.leads):
            return self._go()
        self._say_farewell(self._departure)
        self._doing = _Doing.LINGERING
        self._reporter.enter(Stage.LEAVING)
        return None

    def _stop_for_departure(self) -> None:
        """This agent has announced that it leaves, and its workers do not stop at a step that all agree on."""
        departure = self._departure
        if departure is None or self._after_stop == self._go:
            return
        if self._doing is _Doing.TRAINING and self._placed is not None:
            # Workers on other nodes will miss them.
            self._coordination.held(self._placed.round, None)
        now = time.monotonic()
        gently = self._signalled and now < departure.stop_by
        by = departure.stop_by if gently else min(now + self._shutdown_timeout, departure.gone_by)
        self._stop(self._go, by - now, gently=gently)

    def _go(self) -> RunResult:
        assert self._departure is not None
        self._say_farewell(self._departure)
        self.outcome = AgentOutcome(ExitCode.LEFT, detail=f"left after {self._departure.detail}")
        raise RendezvousGracefulExitError(self.outcome.detail)

    def _say_farewell(self, departure: Departure) -> None:
        if not self._said_farewell:
            self._said_farewell = True
            self._coordination.left(departure.reason, stopped=self._as_agreed)

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
        self._agreement.close()
        if self._processes is not None:
            self._processes.close(death_sig, timeout)
            self._processes = self._pcontext = None
