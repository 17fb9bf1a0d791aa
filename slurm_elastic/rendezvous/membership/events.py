"""The events of a leader: messages of agents, findings of Slurm, time."""

from __future__ import annotations

from dataclasses import dataclass

from slurm_elastic.rendezvous.membership.agents import AgentInfo, LeaveReason, WorkerFailure
from slurm_elastic.rendezvous.membership.stragglers import WorkerPosition


@dataclass(frozen=True, slots=True)
class Joined:
    """An agent without workers asks for a place in the next round.

    Attributes:
        candidate: The agent's identity, node and sizes.
        attempt: Number of this join of the agent, from 1; the leader ignores one that is below the last it has seen.
        last_round: Number of the last round in which the agent had a place; None before the first.
        restarts: Worker failures charged to the run, as the last leader told the agent; the record may be behind.
        cut_off: True if the agent stopped the workers of `last_round` because its leader was silent.
    """

    candidate: AgentInfo
    attempt: int
    last_round: int | None = None
    restarts: int = 0
    cut_off: bool = False


@dataclass(frozen=True, slots=True)
class Connected:
    """An agent has connected (again).

    Attributes:
        agent: Identity of the agent.
        running: Number of the round whose workers the agent has; None if it has none.
        coming: True if the agent has not joined yet, and joins as soon as it can start workers.
        over: True if the round `running` is over: a leader has said so, or all workers have stopped at the stop step.
    """

    agent: str
    running: int | None
    coming: bool = False
    over: bool = False


@dataclass(frozen=True, slots=True)
class Disconnected:
    """An agent's connection broke, which neither a newer connection had replaced nor the leader had closed.

    Attributes:
        agent: Identity of the agent.
    """

    agent: str


@dataclass(frozen=True, slots=True)
class Returning:
    """An agent whose connection broke has greeted on another one, and has still to prove who it is.

    Attributes:
        agent: Identity of the agent.
    """

    agent: str


@dataclass(frozen=True, slots=True)
class SignsOfLife:
    """The newest messages of agents, gathered between two ticks.

    Attributes:
        signs: Identity of an agent, and the leader's monotonic time in seconds when its newest message came.
    """

    signs: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class Ponged:
    """An agent answers a probe.

    Attributes:
        agent: Identity of the agent.
        probe: Number of the probe.
        positions: How far workers of this agent are in the round: of those that are equally far the first, at most
            four; none if none reports.
    """

    agent: str
    probe: int
    positions: tuple[WorkerPosition, ...] = ()


@dataclass(frozen=True, slots=True)
class Leaving:
    """An agent announces that it will go; its workers may still run until :class:`Left`.

    Attributes:
        agent: Identity of the agent.
        reason: Why the agent goes.
        seconds: Seconds from now until it has to be gone; None if it does not know.
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
        agent: Identity of the agent.
        reason: Why the agent goes.
        stopped: True if its workers stopped at the stop step.
    """

    agent: str
    reason: LeaveReason
    stopped: bool = False


@dataclass(frozen=True, slots=True)
class Held:
    """An agent answers :class:`~.messages.Holding`.

    Attributes:
        agent: Identity of the agent.
        round: Number of the round that the question was about.
        step: The earliest step at which all workers of this agent can stop, and beyond which none of them goes before
            it is told at which they do. None if some of them takes no part, or if they end in another way after all.
    """

    agent: str
    round: int
    step: int | None


@dataclass(frozen=True, slots=True)
class WorkerFailed:
    """A worker of this round failed while its agent was not stopping it; the agent stops the other workers.

    Attributes:
        agent: Identity of the agent.
        round: Number of the round.
        failure: The worker, and what is known of the cause.
    """

    agent: str
    round: int
    failure: WorkerFailure


@dataclass(frozen=True, slots=True)
class Finished:
    """All workers of an agent ended with exit code 0.

    Attributes:
        agent: Identity of the agent.
        round: Number of the round.
    """

    agent: str
    round: int


@dataclass(frozen=True, slots=True)
class Closed:
    """An agent closes the rendezvous for all agents (torch's ``set_closed``).

    Attributes:
        agent: Identity of the agent.
    """

    agent: str


@dataclass(frozen=True, slots=True)
class Gone:
    """The processes of agents have ended: their nodes' kernels, or records, say so.

    Attributes:
        agents: Identities of these agents.
    """

    agents: frozenset[str]


@dataclass(frozen=True, slots=True)
class Claimed:
    """The records name this leader as that of the incarnation, as :class:`~.decisions.Claim` asked."""


@dataclass(frozen=True, slots=True)
class NodesDown:
    """Slurm says that nodes of the allocation are down.

    Attributes:
        down: Their names.
    """

    down: frozenset[str]


@dataclass(frozen=True, slots=True)
class Tick:
    """Time went by; on a tick the leader declares silent agents lost.

    The caller processes all messages that arrived before it first.
    """


MemberMessage = Connected | Joined | Ponged | Leaving | Held | Left | WorkerFailed | Finished | Closed
"""Events that agents send as messages."""

Event = MemberMessage | Disconnected | Returning | SignsOfLife | Gone | Claimed | NodesDown | Tick
