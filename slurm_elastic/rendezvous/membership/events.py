"""The events of a leader: messages of agents, Slurm's word, time."""

from __future__ import annotations

from dataclasses import dataclass

from slurm_elastic.rendezvous.membership.agents import AgentInfo, WorkerFailure
from slurm_elastic.rendezvous.membership.reasons import LeaveReason
from slurm_elastic.rendezvous.membership.stragglers import Slowest

__all__ = [
    "Claimed",
    "Closed",
    "Connected",
    "Disconnected",
    "Event",
    "Finished",
    "Gone",
    "Heard",
    "Held",
    "Joined",
    "Leaving",
    "Left",
    "NodesSeen",
    "Ponged",
    "Returning",
    "Tick",
    "WorkerFailed",
]


@dataclass(frozen=True, slots=True)
class Joined:
    """An agent has no workers (any more) and wants a place.

    Attributes:
        candidate: what it says of itself.
        attempt: counts the joins of this agent from 1; an older one than the last seen is ignored.
        last_round: the last round in which it was given a place, None before the first.
        restarts: worker failures charged so far, as the last leader told it; what is on record may be behind.
        cut_off: whether it has stopped the workers of `last_round` because it heard no leader.
    """

    candidate: AgentInfo
    attempt: int
    last_round: int | None = None
    restarts: int = 0
    cut_off: bool = False


@dataclass(frozen=True, slots=True)
class Connected:
    """An agent's connection stands (again).

    Attributes:
        agent: whose.
        running: the round whose workers it has, None when it has none.
        coming: whether it has not joined yet, and will as soon as it is ready to start workers.
        over: whether it knows that the round `running` is over: a leader has told it, or all workers stopped as agreed.
    """

    agent: str
    running: int | None
    coming: bool = False
    over: bool = False


@dataclass(frozen=True, slots=True)
class Disconnected:
    """An agent's connection broke. Not for one that has been replaced by a newer one, or that the leader closed."""

    agent: str


@dataclass(frozen=True, slots=True)
class Returning:
    """An agent whose connection broke has greeted on another one, and has still to prove who it is."""

    agent: str


@dataclass(frozen=True, slots=True)
class Heard:
    """Signs of life, gathered over a short while: agent and leader's monotonic time."""

    signs: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class Ponged:
    """The answer to a probe.

    Attributes:
        agent: who answers.
        probe: what it answers.
        slowest: the worker of this agent that has taken the fewest steps of the round; None if none tells.
    """

    agent: str
    probe: int
    slowest: Slowest | None = None


@dataclass(frozen=True, slots=True)
class Leaving:
    """An agent announces that it will go; its workers may still run until :class:`Left`.

    Attributes:
        reason: why.
        seconds: until it has to be gone, counted from now; None if nobody knows.
    """

    agent: str
    reason: LeaveReason
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Left:
    """An agent has no workers any more and goes.

    A member that goes with FINISHED has done its part of the round: it stays in the table, and the end of its
    connection is no loss.

    Attributes:
        reason: why.
        stopped: whether its workers stopped by themselves at the step that was agreed on.
    """

    agent: str
    reason: LeaveReason
    stopped: bool = False


@dataclass(frozen=True, slots=True)
class Held:
    """The answer to :class:`~.decisions.Hold`.

    Attributes:
        step: the earliest step at which all workers of this agent can stop, and beyond which none of them goes before
            it is told at which they do. None if some of them takes no part, or if they end in another way after all.
    """

    agent: str
    round: int
    step: int | None


@dataclass(frozen=True, slots=True)
class WorkerFailed:
    """A worker of this round failed by itself; the agent has stopped, or is stopping, its other workers."""

    agent: str
    round: int
    failure: WorkerFailure


@dataclass(frozen=True, slots=True)
class Finished:
    """All workers of an agent ended well in this round."""

    agent: str
    round: int


@dataclass(frozen=True, slots=True)
class Closed:
    """An agent closes the rendezvous for all (torch's ``set_closed``)."""

    agent: str


@dataclass(frozen=True, slots=True)
class Gone:
    """The processes of these members of the last round have ended, as is known for certain."""

    agents: frozenset[str]


@dataclass(frozen=True, slots=True)
class Claimed:
    """The epoch is the leader's own, as asked for by :class:`~.decisions.Claim`."""


@dataclass(frozen=True, slots=True)
class NodesSeen:
    """Slurm's word: these nodes of the allocation are down."""

    down: frozenset[str]


@dataclass(frozen=True, slots=True)
class Tick:
    """Time went by. What had arrived before has to be processed first: on a tick agents are given up and blamed."""


Event = (
    Joined
    | Connected
    | Disconnected
    | Returning
    | Heard
    | Held
    | Ponged
    | Leaving
    | Left
    | WorkerFailed
    | Finished
    | Closed
    | Gone
    | Claimed
    | NodesSeen
    | Tick
)
