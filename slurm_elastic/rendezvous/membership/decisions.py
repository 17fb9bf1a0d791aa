"""The decisions of the leader. One that has something to say carries the message."""

from __future__ import annotations

from dataclasses import dataclass

from slurm_elastic.rendezvous.membership.agents import LeaveReason, WorkerFailure
from slurm_elastic.rendezvous.membership.assignment import Table
from slurm_elastic.rendezvous.membership.messages import Ended, Interrupted, MembershipMessage, Resigned


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
        agents: the receivers.
        message: goes out as it is.
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
class Spare(Send):
    """The one agent of `agents`, on this node, waits above the maximum."""

    node: str = ""


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
    """An agent is lost: it has not announced its departure. If it lives, it has to join as a new one.

    `seconds` is the time since its last sign of life.
    """

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

    `lost` is the node of the leader that is followed; empty if there was none.
    """

    lost: str


Decision = Publish | Resend | Send | Interrupt | Spare | Finish | Resign | Drop | Retire | Claim
