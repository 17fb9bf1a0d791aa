"""The decisions of the leader."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from slurm_elastic.rendezvous.membership.agents import WorkerFailure
from slurm_elastic.rendezvous.membership.assignment import Table
from slurm_elastic.rendezvous.membership.reasons import LeaveReason, Reason

__all__ = [
    "Claim",
    "Decision",
    "Drop",
    "Finish",
    "Hold",
    "Interrupt",
    "Outcome",
    "Probe",
    "Publish",
    "Resend",
    "Resign",
    "Retire",
    "Spare",
    "StopAt",
]


class Outcome(enum.Enum):
    """The outcome of a run."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    TIMED_OUT = "timed_out"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class Publish:
    """A round is complete: give every agent of the table its place.

    `seconds` is how long forming took, from the event that ended the round before, without the time during which the
    leader itself was stopped.
    """

    table: Table
    seconds: float


@dataclass(frozen=True, slots=True)
class Resend:
    """Give one agent its place in the current round once more; the first answer may have been lost."""

    agent: str
    table: Table


@dataclass(frozen=True, slots=True)
class Interrupt:
    """The round is over: these agents stop their workers and join again, or go if they have announced it.

    `node` is the one that caused it. `step` is the one at which all workers have stopped by themselves, None if there
    was none. `restarts` are the worker failures charged so far, this end included. With `on_record` an earlier leader
    has written down that the round is over, and why. `failure` is the one of a worker that ended the round, if one did.
    """

    agents: tuple[str, ...]
    round: int
    reason: Reason
    node: str
    detail: str = ""
    step: int | None = None
    restarts: int = 0
    on_record: bool = False
    failure: WorkerFailure | None = None


@dataclass(frozen=True, slots=True)
class Hold:
    """Ask these agents for the earliest step at which their workers can stop; they go no further until told."""

    agents: tuple[str, ...]
    round: int


@dataclass(frozen=True, slots=True)
class StopAt:
    """The workers of these agents stop by themselves at this step.

    `reason`, `node` and `detail` say why; `seconds` is the time that they have, None for all they want.
    """

    agents: tuple[str, ...]
    round: int
    step: int
    reason: Reason
    node: str
    seconds: float | None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Probe:
    """Ask these agents for a sign of life at once."""

    agents: tuple[str, ...]
    probe: int


@dataclass(frozen=True, slots=True)
class Drop:
    """An agent is lost: nobody announced its departure. If it lives, it has to join as a new one.

    `seconds` is the time since its last sign of life.
    """

    agent: str
    node: str
    why: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Retire:
    """An agent that announced it has gone."""

    agent: str
    node: str
    reason: LeaveReason


@dataclass(frozen=True, slots=True)
class Spare:
    """An agent waits above the maximum."""

    agent: str
    node: str


@dataclass(frozen=True)
class Finish:
    """The run has ended: tell every agent, the spares too."""

    outcome: Outcome
    agents: tuple[str, ...]
    failure: WorkerFailure | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Claim:
    """Take the epoch: enough members of the last round are here. Without it nothing can be published."""

    lost: str
    """The node of the leader that is followed; empty if there was none."""


@dataclass(frozen=True, slots=True)
class Resign:
    """The leader's own agent goes, and nobody has workers: tell these agents to find another leader."""

    agents: tuple[str, ...]


Decision = Publish | Resend | Hold | StopAt | Interrupt | Probe | Drop | Retire | Spare | Finish | Claim | Resign
