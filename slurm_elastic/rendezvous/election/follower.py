"""The agent's side of the membership protocol: what it says, and which of the leader's words still concern it.

Pure, like :mod:`slurm_elastic.rendezvous.membership`, so that the simulation runs the very code of the agents.
"""

from __future__ import annotations

from dataclasses import dataclass

from slurm_elastic.rendezvous.membership import (
    AgentInfo,
    Closed,
    Connected,
    Finished,
    Held,
    Joined,
    LeaveReason,
    Leaving,
    Left,
    WorkerFailed,
    WorkerFailure,
    replace,
)

__all__ = ["Participant"]


@dataclass(frozen=True)
class Participant:
    """One agent's knowledge of its own place.

    Attributes:
        agent: its identity.
        attempt: number of its newest join, 0 before the first.
        candidate: what it said in that join; set while it waits for a place.
        last_round: the last round in which it was given a place.
        running: whether it may have workers of `last_round`.
        stop: the step at which the workers of `last_round` stop; None until it is known.
        leave_by: own monotonic time at which it has to be gone; None if it does not leave, or nobody knows.
        told: what it has told the leader that still holds, to be said again on a new connection.
        restarts: worker failures charged so far, as a leader told it: the next one may not find that on record.
        coming: whether it will join soon, for the first time.
        cut_off: whether the workers of `last_round` were to stop because no leader was heard.
        over: whether it knows that `last_round` is over, which a leader has written down then.
    """

    agent: str
    attempt: int = 0
    candidate: AgentInfo | None = None
    last_round: int | None = None
    running: bool = False
    stop: int | None = None
    leave_by: float | None = None
    told: tuple[Leaving | Left | WorkerFailed | Finished | Closed, ...] = ()
    restarts: int = 0
    coming: bool = False
    cut_off: bool = False
    over: bool = False

    def join(self, candidate: AgentInfo) -> tuple[Participant, Joined]:
        """Say that there are no workers here (any more) and that a place is wanted.

        How the last round ended here still holds: a leader that has not heard of the failure would charge nobody.
        """
        told = tuple(message for message in self.told if not isinstance(message, Leaving))
        joining = replace(self, attempt=self.attempt + 1, candidate=candidate, running=False, told=told, coming=False)
        return joining, Joined(candidate, joining.attempt, joining.last_round, joining.restarts, joining.cut_off)

    def failed(self, failure: WorkerFailure) -> tuple[Participant, WorkerFailed]:
        """Say that a worker of the round that runs here failed by itself.

        The agent may stop the others and join again at once, or wait until it is interrupted.
        """
        failed = WorkerFailed(self.agent, self._placed_in(), failure)
        return replace(self, told=(*self.told, failed)), failed

    def finished(self) -> tuple[Participant, Finished]:
        """Say that all workers of the round that runs here ended well."""
        finished = Finished(self.agent, self._placed_in())
        return replace(self, told=(*self.told, finished)), finished

    def leaving(self, reason: LeaveReason, seconds: float | None, now: float) -> tuple[Participant, Leaving]:
        """Say that this agent will go and wants no place any more; to be said before its workers are stopped.

        Args:
            reason: why.
            seconds: until it has to be gone, None if nobody knows.
            now: own monotonic time.
        """
        leaving = Leaving(self.agent, reason, seconds)
        leave_by = None if seconds is None else now + seconds
        told = tuple(message for message in self.told if not isinstance(message, Leaving))
        return replace(self, candidate=None, leave_by=leave_by, told=(*told, leaving), coming=False), leaving

    def held(self, round_: int, step: int | None) -> Held:
        """Say at which step the workers of this round can stop, or that they cannot."""
        return Held(self.agent, round_, step)

    def left(self, reason: LeaveReason, *, stopped: bool) -> tuple[Participant, Left]:
        """Say farewell.

        With `stopped`, the workers stopped at the agreed step, and :meth:`interrupted` tells when the others have, too.
        """
        left = Left(self.agent, reason, stopped)
        # Another leader, which this agent meets on its way out, would wait for it.
        running = self.running and stopped
        return replace(self, running=running, told=(*self.told, left), coming=False, over=running), left

    def closing(self) -> tuple[Participant, Closed]:
        """Say that the run is closed for everybody."""
        closed = Closed(self.agent)
        return replace(self, told=(*self.told, closed)), closed

    def greet(
        self, now: float
    ) -> tuple[Participant, tuple[Connected | Joined | Leaving | Left | WorkerFailed | Finished | Closed, ...]]:
        """Return the first messages on a new connection: those on the connection before may have been lost.

        `now` is own monotonic time: a deadline is nearer than when it was said first.
        """
        told = (
            Leaving(message.agent, message.reason, self.leave_by - now)
            if isinstance(message, Leaving) and self.leave_by is not None
            else message
            for message in self.told
        )
        running = self.last_round if self.running else None
        greeting = (Connected(self.agent, running, self.coming, self.running and self.over), *told)
        if self.candidate is None:
            return self, greeting
        joining, joined = self.join(self.candidate)
        return joining, (*greeting, joined)

    def placed(self, attempt: int, round_: int) -> Participant | None:
        """Take a place, or None if it answers an older join and must be ignored."""
        if self.candidate is None or attempt != self.attempt:
            return None
        return replace(
            self, candidate=None, last_round=round_, running=True, stop=None, told=(), cut_off=False, over=False
        )

    def charged(self, restarts: int) -> Participant:
        """Note how many worker failures a leader says are charged so far."""
        return self if restarts <= self.restarts else replace(self, restarts=restarts)

    def holding(self, round_: int) -> bool:
        """True if the leader has asked the workers here for a step, and has not sent the stop step yet."""
        return self.running and self.last_round == round_ and self.stop is None

    def stopping(self, round_: int, step: int) -> Participant | None:
        """Take note of the step at which the workers stop, or None if they are not concerned."""
        if not self.running or self.last_round != round_:
            return None
        return replace(self, stop=step)

    def interrupted(self, round_: int) -> bool:
        """True if the workers that run here belong to the round that is over."""
        return self.running and self.last_round is not None and round_ >= self.last_round

    def told_over(self) -> Participant:
        """Note that a leader has said so of the round whose workers run here."""
        return replace(self, over=True)

    def unheard(self) -> Participant | None:
        """No leader is heard, which gives up this agent about now. None if no worker here has to stop for that.

        Those that have all ended well need not: another leader, if there is one, tells when their round is over.
        """
        if not self.running or self.cut_off or any(isinstance(message, Finished) for message in self.told):
            return None
        return replace(self, cut_off=True)

    def stopped(self) -> Participant:
        """Note that no worker runs here any more. The next word is a join or a farewell: nobody will ask for it."""
        return replace(self, running=False)

    def _placed_in(self) -> int:
        if self.last_round is None:
            raise ValueError("an agent that never had a place has no workers")
        return self.last_round
