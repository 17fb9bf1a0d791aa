"""The events of a leader, its decisions, and the messages in which it tells of them. Data only.

What agents send are events; a decision that has something to say carries the message of the leader. `agent` is the
identity of the agent that an event or decision is about, `round` and `probe` are numbers, `node` is a name.
:mod:`slurm_elastic.rendezvous.transport.messages` adds what membership does not decide, and encodes all of them.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from slurm_elastic.rendezvous.membership.agents import AgentInfo, LeaveReason, Reason, WorkerFailure
from slurm_elastic.rendezvous.membership.assignment import Table
from slurm_elastic.rendezvous.membership.stragglers import WorkerPosition


class Outcome(enum.Enum):
    """The outcome of a run."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    TIMED_OUT = "timed_out"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class Interrupted:
    """This round is over: stop its workers and join again, or go if that was announced.

    Attributes:
        node: name of the node that caused it; several are separated by commas.
        restarts: worker failures charged so far, this end included.
    """

    round: int
    reason: Reason
    node: str
    detail: str
    restarts: int = 0


@dataclass(frozen=True, slots=True)
class Holding:
    """This round ends as planned: report at which step the workers can stop; they wait there for the stop step.

    Attributes:
        leaving: agents that have announced a leave, and will not lead.
    """

    round: int
    leaving: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Stopping:
    """The workers of this round stop at this step; then their agents join again, or leave if they announced it.

    Attributes:
        seconds: until the workers have to stop; None without a limit.
    """

    round: int
    step: int
    reason: Reason
    node: str
    detail: str
    seconds: float | None
    leaving: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Probed:
    """Answer at once, with this number.

    Attributes:
        dumps: True if workers have to write their collectives and stacks beside their logs.
    """

    probe: int
    dumps: bool = False


@dataclass(frozen=True, slots=True)
class Waiting:
    """The round has as many nodes as it can have; wait as a spare."""


@dataclass(frozen=True, slots=True)
class Resigned:
    """The leader leaves, and no agent has workers: another agent has to lead.

    Attributes:
        gone: members of the last round that are gone for good.
    """

    agent: str
    gone: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Ended:
    """The run has ended for all agents.

    Attributes:
        failure: the worker failure that has ended it; None without one.
    """

    outcome: Outcome
    failure: WorkerFailure | None
    detail: str


MembershipMessage = Interrupted | Holding | Stopping | Probed | Waiting | Resigned | Ended


@dataclass(frozen=True, slots=True)
class Joined:
    """An agent without workers asks for a place in the next round.

    Attributes:
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
    """An agent's connection broke, which neither a newer connection had replaced nor the leader had closed."""

    agent: str


@dataclass(frozen=True, slots=True)
class Returning:
    """An agent whose connection broke has greeted on another one, and has still to prove who it is."""

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
        stopped: True if its workers stopped at the stop step.
    """

    agent: str
    reason: LeaveReason
    stopped: bool = False


@dataclass(frozen=True, slots=True)
class Held:
    """An agent answers :class:`Holding`.

    Attributes:
        step: The earliest step at which all workers of this agent can stop, and beyond which none of them goes before
            it is told at which they do. None if some of them takes no part, or if they end in another way after all.
    """

    agent: str
    round: int
    step: int | None


@dataclass(frozen=True, slots=True)
class WorkerFailed:
    """A worker of this round failed while its agent was not stopping it; the agent stops the other workers."""

    agent: str
    round: int
    failure: WorkerFailure


@dataclass(frozen=True, slots=True)
class Finished:
    """All workers of an agent ended with exit code 0."""

    agent: str
    round: int


@dataclass(frozen=True, slots=True)
class Closed:
    """An agent closes the rendezvous for all agents (torch's ``set_closed``)."""

    agent: str


@dataclass(frozen=True, slots=True)
class Gone:
    """The processes of agents have ended: their nodes' kernels, or records, say so."""

    agents: frozenset[str]


@dataclass(frozen=True, slots=True)
class Claimed:
    """The records name this leader as that of the incarnation, as :class:`Claim` asked."""


@dataclass(frozen=True, slots=True)
class NodesDown:
    """Slurm says that nodes of the allocation are down."""

    down: frozenset[str]


@dataclass(frozen=True, slots=True)
class Tick:
    """Time went by; on a tick the leader declares silent agents lost.

    The caller processes all messages that arrived before it first.
    """


MemberMessage = Connected | Joined | Ponged | Leaving | Held | Left | WorkerFailed | Finished | Closed
"""Events that agents send as messages."""

Event = MemberMessage | Disconnected | Returning | SignsOfLife | Gone | Claimed | NodesDown | Tick


@dataclass(frozen=True, slots=True)
class Publish:
    """A round is complete: send each agent of the table its assignment.

    `seconds` is how long forming took, from the event that ended the round before, without the time during which the
    leader itself was stopped.
    """

    table: Table
    seconds: float


@dataclass(frozen=True, slots=True)
class Resend:
    """Send one agent its assignment in the current round once more; the first one may have been lost."""

    agent: str
    table: Table


@dataclass(frozen=True)
class Send:
    """Send a message.

    Attributes:
        everyone: whether it goes to all others that are connected, too: coordinators that wait, clients, agents that
            have not joined.
    """

    agents: tuple[str, ...]
    message: MembershipMessage
    everyone: bool = False


@dataclass(frozen=True)
class Interrupt(Send):
    """The round is over.

    Attributes:
        step: the stop step, if all workers have stopped there; None if there was none.
        on_record: whether an earlier leader has written down that the round is over, and why.
        failure: the worker failure that ended the round, if one did.
        unusable: the number of nodes of the round, if the script cannot use it; the detail of the message says so.
    """

    message: Interrupted
    step: int | None = None
    on_record: bool = False
    failure: WorkerFailure | None = None
    unusable: int | None = None


@dataclass(frozen=True)
class Finish(Send):
    """The run has ended."""

    message: Ended


@dataclass(frozen=True)
class Resign(Send):
    """The leader's own agent goes, and no agent has workers: another agent has to lead."""

    message: Resigned


@dataclass(frozen=True, slots=True)
class Drop:
    """An agent is lost, `seconds` after its last sign of life, without a leave. If it lives, it joins as a new one."""

    agent: str
    node: str
    why: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Retire:
    """An agent that has announced its leave has gone."""

    agent: str
    node: str
    reason: LeaveReason


@dataclass(frozen=True, slots=True)
class Claim:
    """Take the term: enough members of the last round are here. Without it nothing can be published.

    `lost` is the node of the leader that is followed, if there was one.
    """

    lost: str


Decision = Publish | Resend | Send | Interrupt | Finish | Resign | Drop | Retire | Claim
