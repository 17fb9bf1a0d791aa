"""The events of the life cycle: what the shell tells the machine."""

from __future__ import annotations

from dataclasses import dataclass

from slurm_elastic.rendezvous.election import events as leader_events
from slurm_elastic.rendezvous.membership.agents import LeaveReason, WorkerFailure


class OwnEvent:
    """An event that the shell tells; the leader's messages are events as they are."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Started(OwnEvent):
    """The agent begins. `signalled`: a signal that asks it to leave has come already."""

    signalled: bool = False


@dataclass(frozen=True, slots=True)
class Signalled(OwnEvent):
    """A signal asks the agent to leave; the agent has at least `seconds` for that, None if that is unknown."""

    reason: LeaveReason
    detail: str
    seconds: float | None = None
    asked: bool = False
    interrupts: bool = False


@dataclass(frozen=True, slots=True)
class Diagnosed(OwnEvent):
    """The agent has found out why it was signalled, or that its job's time limit is near.

    Attributes:
        for_job: True if all agents of the job have to leave, and this one tells them.
    """

    reason: LeaveReason
    seconds: float | None
    detail: str
    for_job: bool = False


@dataclass(frozen=True, slots=True)
class WorkersStarted(OwnEvent):
    """Result of StartWorkers: the workers run."""


@dataclass(frozen=True, slots=True)
class StartInterrupted(OwnEvent):
    """Result of StartWorkers: an event was waiting, and no worker was started."""


@dataclass(frozen=True, slots=True)
class StartFailed(OwnEvent):
    """Result of StartWorkers: the program cannot be run here."""

    failure: WorkerFailure


@dataclass(frozen=True, slots=True)
class StepAccepted(OwnEvent):
    """Result of StopAtStep: the workers stop at this step."""

    step: int


@dataclass(frozen=True, slots=True)
class WorkersSucceeded(OwnEvent):
    """All workers ended with exit code 0. `agreed`: one of them was told to stop at the agreed step."""

    agreed: bool = False


@dataclass(frozen=True, slots=True)
class WorkersFailed(OwnEvent):
    """A worker failed while the agent was not stopping it."""


@dataclass(frozen=True, slots=True)
class WorkersEnded(OwnEvent):
    """No worker runs any more."""


@dataclass(frozen=True, slots=True)
class RoundClosed(OwnEvent):
    """Result of CloseRound; `survivors` is one line about processes that SIGKILL does not end, empty for none."""

    leads: bool = False
    survivors: str = ""


@dataclass(frozen=True, slots=True)
class DeadlineReached(OwnEvent):
    """The time of `deadline` has come."""


Event = OwnEvent | leader_events.LeaderEvent | leader_events.RecordsLost
