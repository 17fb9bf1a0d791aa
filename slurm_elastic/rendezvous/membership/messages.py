"""The messages of a leader that membership decides about.

What agents send are events of the membership (:mod:`.events`). :mod:`slurm_elastic.rendezvous.transport.messages` adds
what membership does not decide, and encodes all of them.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from slurm_elastic.rendezvous.membership.agents import Reason, WorkerFailure


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
        round: number of the round.
        reason, detail: why it is over.
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
        round: number of the round.
        leaving: agents that have announced a leave, and will not lead.
    """

    round: int
    leaving: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Stopping:
    """The workers of this round stop at this step; then their agents join again, or leave if they announced it.

    Attributes:
        round: number of the round.
        step: the stop step.
        reason, node, detail: as of Interrupted.
        seconds: until the workers have to stop; None without a limit.
        leaving: as of Holding.
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
        probe: The number.
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
        agent: the leader until now.
        gone: members of the last round that are gone for good.
    """

    agent: str
    gone: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Ended:
    """The run has ended for all agents.

    Attributes:
        outcome: see :class:`Outcome`.
        failure: the worker failure that has ended it; None without one.
        detail: one line for people; may be empty.
    """

    outcome: Outcome
    failure: WorkerFailure | None
    detail: str


MembershipMessage = Interrupted | Holding | Stopping | Probed | Waiting | Resigned | Ended
