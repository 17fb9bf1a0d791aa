"""The actions of the life cycle: what the shell, :mod:`slurm_elastic.agent.agent`, carries out."""

from __future__ import annotations

from dataclasses import dataclass

from slurm_elastic.rendezvous.membership.agents import LeaveReason
from slurm_elastic.rendezvous.transport.messages import AgentMessage, Assignment


class Action:
    """An action, which may have a result: the shell reports that as an event."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Join(Action):
    """End the worker store of the last round, if wanted; reserve a port for the next one, and ask for an assignment."""

    ends_store: bool = False


@dataclass(frozen=True, slots=True)
class StartWorkers(Action):
    """Serve the worker store, if it is served here, and start the workers of a round.

    Results: WorkersStarted, StartInterrupted, StartFailed.
    """

    round: Assignment


@dataclass(frozen=True, slots=True)
class SignalWorkers(Action):
    """Send ``--worker-signal`` to the workers."""


@dataclass(frozen=True, slots=True)
class Hold(Action):
    """Let the workers wait before their next step, and tell the leader at which step they can stop."""

    round: int


@dataclass(frozen=True, slots=True)
class StopAtStep(Action):
    """Tell the workers at which step to stop, and the seconds until they are killed; None for no limit.

    Result: StepAccepted, unless they were not held and may be past it.
    """

    round: int
    step: int
    reason: str
    seconds: float | None


@dataclass(frozen=True, slots=True)
class Fence(Action):
    """Forbid the workers to publish checkpoints: the run may go on without this agent."""


@dataclass(frozen=True, slots=True)
class ExpectExits(Action):
    """The workers are about to be stopped: their end is no failure from now on."""

    unplanned: bool = False


@dataclass(frozen=True, slots=True)
class TerminateWorkers(Action):
    """Send SIGTERM to the workers that still run, or with `interrupt` SIGINT."""

    interrupt: bool = False


@dataclass(frozen=True, slots=True)
class CloseRound(Action):
    """Kill whatever is left of the round's workers, and their output. Result: RoundClosed."""


@dataclass(frozen=True, slots=True)
class AnnounceLeave(Action):
    """Tell the leader that this agent will leave, `seconds` from now. `reason` says why, `detail` as text."""

    reason: LeaveReason
    seconds: float
    detail: str


@dataclass(frozen=True, slots=True)
class Tell(Action):
    """Send a message to the leader."""

    message: AgentMessage


@dataclass(frozen=True, slots=True)
class ReportFailure(Action):
    """Tell the leader of the failure of the worker that failed first, while the agent was not stopping it."""


@dataclass(frozen=True, slots=True)
class Log(Action):
    """Write one line to the log."""

    text: str
