"""The elastic agent of one node: starts, watches and stops the workers of each round.

A subclass of torch's LocalElasticAgent. What is torch's stays torch's: worker environment, log specs, error files,
events, metrics. What is replaced is the loop: torch's polls ten times a second and restarts only when its own workers
fail; this one sleeps until a worker ends, the leader says something or a signal comes.
"""

from __future__ import annotations

import logging
import selectors
import time

from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.rendezvous.api import RendezvousGracefulExitError

from slurm_elastic.agent.health import Stage
from slurm_elastic.agent.leaving_agent import LeavingAgent
from slurm_elastic.agent.outcome import AgentOutcome
from slurm_elastic.agent.round_agent import UNPLANNED_STOP_TIMEOUT, Doing
from slurm_elastic.errors import ExitCode
from slurm_elastic.rendezvous.leader_events import CutOff, LeaderLost, Unreachable
from slurm_elastic.rendezvous.leave_requests import LeaveRequested
from slurm_elastic.rendezvous.membership import Outcome, Reason
from slurm_elastic.rendezvous.thread import RecordsLost
from slurm_elastic.rendezvous.transport.messages import Ended, Holding, Interrupted, Placed, Stopping, Waiting

__all__ = ["SlurmElasticAgent"]

logger = logging.getLogger("slurm_elastic")

_UNPLANNED = frozenset({Reason.NODE_LOST, Reason.WORKER_FAILED})


class SlurmElasticAgent(LeavingAgent):
    """One node's agent; see :class:`RoundAgent` for its arguments."""

    def supervise(self) -> AgentOutcome:
        """Take part in the run until it ends or this agent leaves."""
        if self._watchdog is not None:
            self._watchdog.start(self._record_watchdog)
        self.run(self._spec.role)
        return self.outcome

    def _take_part(self) -> RunResult:
        """See base class."""
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
            if self._doing is Doing.STOPPING:
                timeout = 0.0 if self._all_ended() else timeout
                fds = self._processes.running_fds() if self._processes is not None else []
            elif self._processes is not None:
                fds = self._processes.exit_fds()
            for fd in fds:
                selector.register(fd, selectors.EVENT_READ)
            selector.select(timeout)

    def _time_left(self) -> float | None:
        moment = None
        if self._doing is Doing.STOPPING:
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
        if self._doing is Doing.STOPPING:
            if self._terminate_at is not None and time.monotonic() >= self._terminate_at:
                self._terminate()
            return self._stopped() if self._all_ended() or time.monotonic() >= self._stop_by else self._obey()
        result = self._obey()
        if result is None and self._doing is Doing.TRAINING:
            result = self._look_at_workers()
        elif self._doing in (Doing.DONE, Doing.GIVEN_UP):
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
            case Placed() as placed if self._doing is Doing.JOINING:
                self._start_round(placed)
            case Interrupted() if self._doing is Doing.JOINING:
                # Said twice, by two leaders or by the link as well: those workers have ended. To join once more would
                # give up a place that is on its way.
                pass
            case Interrupted(reason=reason) as word:
                if isinstance(word, CutOff):
                    self._agreement.fence()
                planned = reason not in _UNPLANNED
                self._stop(self._join, self._stop_timeout if planned else UNPLANNED_STOP_TIMEOUT, gently=planned)
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

    def _look_at_workers(self) -> RunResult | None:
        assert self._placed is not None
        result = self._result_of(self._processes)
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
        self._is_in(result.state)
        self._result = result
        self._doing = Doing.DONE
        return None

    # Ends that are not this agent's own.

    def _give_up(self, code: ExitCode, detail: str) -> RunResult | None:
        def go() -> RunResult:
            self.outcome = AgentOutcome(code, detail=detail, gave_up=True)
            raise RendezvousGracefulExitError(detail)

        self._told_to_go = True
        self._agreement.fence()
        self._stop(go, UNPLANNED_STOP_TIMEOUT)
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

        self._stop(end, UNPLANNED_STOP_TIMEOUT)
        return None
