"""The planned end of a round on one node, and this agent's own leave."""

from __future__ import annotations

import logging
import time

from torch.distributed.elastic.agent.server.api import RunResult
from torch.distributed.elastic.rendezvous.api import RendezvousGracefulExitError

from slurm_elastic.agent.departure import Departure, depart
from slurm_elastic.agent.health import Stage
from slurm_elastic.agent.outcome import AgentOutcome
from slurm_elastic.agent.reasons import concerns_job, leave_reason, wish_of
from slurm_elastic.agent.round_agent import Doing, RoundAgent
from slurm_elastic.errors import ExitCode
from slurm_elastic.rendezvous.leave_requests import LeaveRequested, job_of
from slurm_elastic.rendezvous.membership import LeaveReason
from slurm_elastic.rendezvous.transport.messages import Stopping

__all__ = ["LeavingAgent"]

logger = logging.getLogger("slurm_elastic")


class LeavingAgent(RoundAgent):
    """Adds to the rounds how they end as planned, and how this agent leaves."""

    _departure: Departure | None = None
    _said_farewell = False

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
            shutdown_timeout=self._stop_timeout,
            margin=self._seat.options.leave_margin,
            now=time.monotonic(),
        )
        self._coordination.leaving(reason, self._stop_timeout if seconds is None else seconds)
        if self._doing is Doing.TRAINING:
            # The leader asks all workers for a step at which to stop, or ends the round at once.
            self._signal_workers()
        elif not again:
            self._stop_for_departure()
        elif self._doing is Doing.STOPPING:
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

    # The step at which workers stop.

    def _hold(self, round_: int) -> None:
        if self._doing is Doing.TRAINING:
            self._signal_workers()
            self._coordination.held(round_, self._agreement.hold())
        elif self._doing in (Doing.GIVEN_UP, Doing.STOPPING):
            self._coordination.held(round_, None)

    def _stop_at(self, word: Stopping) -> None:
        if self._doing is Doing.TRAINING and not self._agreement.stop_at(word):
            self._coordination.held(word.round, None)

    def _knows_step(self) -> bool:
        return self._doing is Doing.TRAINING and self._agreement.step is not None

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
        self._doing = Doing.LINGERING
        self._reporter.enter(Stage.LEAVING)
        return None

    # Going.

    def _stop_for_departure(self) -> None:
        """This agent has announced that it leaves, and its workers do not stop at a step that all agree on."""
        departure = self._departure
        if departure is None or self._after_stop == self._go:
            return
        if self._doing is Doing.TRAINING and self._placed is not None:
            # Workers on other nodes will miss them.
            self._coordination.held(self._placed.round, None)
        now = time.monotonic()
        gently = self._signalled and now < departure.stop_by
        by = departure.stop_by if gently else min(now + self._stop_timeout, departure.gone_by)
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
