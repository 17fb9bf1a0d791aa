"""The agent's side of the membership protocol: what it sends, and which messages of the leader still concern it.

Pure, like :mod:`slurm_elastic.rendezvous.membership`, so that the simulation runs the very code of the agents.
"""

from __future__ import annotations

from dataclasses import dataclass

from slurm_elastic.rendezvous.membership.agents import AgentInfo
from slurm_elastic.rendezvous.membership.events import Closed, Connected, Finished, Joined, Leaving, Left, WorkerFailed
from slurm_elastic.rendezvous.membership.persistent import replace
from slurm_elastic.rendezvous.transport.messages import AgentMessage


@dataclass(frozen=True)
class Follower:
    """One agent's knowledge of its own place.

    Attributes:
        attempt: number of its newest join, 0 before the first.
        candidate: its data in that join; set while it waits for a place.
        last_round: the last round in which it was given a place.
        running: whether it may have workers of `last_round`.
        stop: the step at which the workers of `last_round` stop; None until it is known.
        leave_by: own monotonic time at which it has to be gone; None if it does not leave, or that is not known.
        to_repeat: messages to a leader that still hold, which each new connection begins with.
        restarts: worker failures charged so far, as a leader has said: the next one may not find that on record.
        coming: whether it will join soon, for the first time.
        cut_off: whether the workers of `last_round` had to stop because the leader was silent.
        over: whether it knows that `last_round` is over, which a leader has written down then.
    """

    agent: str
    attempt: int = 0
    candidate: AgentInfo | None = None
    last_round: int | None = None
    running: bool = False
    stop: int | None = None
    leave_by: float | None = None
    to_repeat: tuple[Leaving | Left | WorkerFailed | Finished | Closed, ...] = ()
    restarts: int = 0
    coming: bool = False
    cut_off: bool = False
    over: bool = False

    def join(self, candidate: AgentInfo) -> tuple[Follower, Joined]:
        """Return the message that no workers run here and that the agent wants a place.

        A new leader gets the reports on the last round again: without that of a failure it would not charge it.
        """
        to_repeat = tuple(message for message in self.to_repeat if not isinstance(message, Leaving))
        joining = replace(
            self, attempt=self.attempt + 1, candidate=candidate, running=False, to_repeat=to_repeat, coming=False
        )
        return joining, Joined(candidate, joining.attempt, joining.last_round, joining.restarts, joining.cut_off)

    def told(self, message: AgentMessage, now: float) -> Follower:
        """Note what the agent tells its leader, if each leader that follows has to know it, too.

        A leader that needs any other message asks for it again. `now` is own monotonic time.
        """
        match message:
            case Leaving(seconds=seconds):
                # Its workers are stopped only then.
                leave_by = None if seconds is None else now + seconds
                earlier = tuple(said for said in self.to_repeat if not isinstance(said, Leaving))
                return replace(self, candidate=None, leave_by=leave_by, to_repeat=(*earlier, message), coming=False)
            case Left(stopped=stopped):
                # Another leader, which this agent meets on its way out, would wait for it. With workers that stopped at
                # the agreed step it stays until the others have, too.
                running = self.running and stopped
                to_repeat = (*self.to_repeat, message)
                return replace(self, running=running, to_repeat=to_repeat, coming=False, over=running)
            case WorkerFailed() | Finished() | Closed():
                return replace(self, to_repeat=(*self.to_repeat, message))
            case _:
                return self

    def greet(
        self, now: float
    ) -> tuple[Follower, tuple[Connected | Joined | Leaving | Left | WorkerFailed | Finished | Closed, ...]]:
        """Return the first messages on a new connection: those on the connection before may have been lost.

        `now` is own monotonic time: a deadline is nearer than when it was said first.
        """
        to_repeat = (
            Leaving(message.agent, message.reason, self.leave_by - now)
            if isinstance(message, Leaving) and self.leave_by is not None
            else message
            for message in self.to_repeat
        )
        running = self.last_round if self.running else None
        greeting = (Connected(self.agent, running, self.coming, self.running and self.over), *to_repeat)
        if self.candidate is None:
            return self, greeting
        joining, joined = self.join(self.candidate)
        return joining, (*greeting, joined)

    def placed(self, attempt: int, round_: int) -> Follower | None:
        """Take a place, or None if it answers an older join and must be ignored."""
        if self.candidate is None or attempt != self.attempt:
            return None
        return replace(
            self, candidate=None, last_round=round_, running=True, stop=None, to_repeat=(), cut_off=False, over=False
        )

    def charged(self, restarts: int) -> Follower:
        """Note how many worker failures a leader says are charged so far."""
        return self if restarts <= self.restarts else replace(self, restarts=restarts)

    def holding(self, round_: int) -> bool:
        """True if the leader has asked the workers here for a step, and has not sent the stop step yet."""
        return self.running and self.last_round == round_ and self.stop is None

    def stopping(self, round_: int, step: int) -> Follower | None:
        """Take note of the step at which the workers stop, or None if they are not concerned."""
        if not self.running or self.last_round != round_:
            return None
        return replace(self, stop=step)

    def interrupted(self, round_: int) -> bool:
        """True if the workers that run here belong to the round that is over."""
        return self.running and self.last_round is not None and round_ >= self.last_round

    def note_over(self) -> Follower:
        """Note that a leader has said so of the round whose workers run here."""
        return replace(self, over=True)

    def cut_off_now(self) -> Follower | None:
        """Note that the leader is silent, and gives this agent up about now. None if no worker has to stop for that.

        Those that have all ended well need not: another leader, if there is one, says when their round is over.
        """
        if not self.running or self.cut_off or any(isinstance(message, Finished) for message in self.to_repeat):
            return None
        return replace(self, cut_off=True)

    @property
    def owes_join(self) -> bool:
        """True from a cut until it joins again or leaves, which explains what its stopped workers did to others."""
        return self.cut_off and self.candidate is None
