"""The states of the life cycle, and what it depends on: the settings, and how a departure ends.

Moments are own monotonic time in seconds.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

from slurm_elastic.agent.lifecycle.actions import AnnounceLeave
from slurm_elastic.errors import ExitCode
from slurm_elastic.rendezvous.membership.agents import LeaveReason, WorkerFailure
from slurm_elastic.rendezvous.membership.planned_stop import seconds_to_stop
from slurm_elastic.rendezvous.transport.messages import Assignment

ANSWER_TIMEOUT = 1.0
"""Seconds for which workers train on after a signal until Slurm has named its cause; an answer takes some 0.1 s."""
_OVERDUE_TIMEOUT = 2.0
"""Seconds that workers get if the deadline of a leave is past already: Slurm ends them, or the deadline was wrong."""


@dataclass(frozen=True, slots=True)
class LifecycleConfig:
    """The settings of an agent that its life cycle depends on.

    Attributes:
        shutdown_timeout: Seconds between SIGTERM and SIGKILL for workers whose round ends as planned.
        leave_margin: See :func:`~slurm_elastic.rendezvous.membership.planned_stop.seconds_to_stop`.
    """

    node: str
    run_id: str
    leader_host: str
    shutdown_timeout: float
    leave_margin: float
    signals_workers: bool = False


@dataclass(frozen=True, slots=True)
class AgentOutcome:
    """The end of this agent.

    Attributes:
        failure: The run's root cause; None if the run did not fail.
        gave_up: True if this agent ends alone and others may go on: it found no leader, lost the records, or could not
            end its workers.
        no_leader: True if it has reached no leader from its start until `join_timeout` was over.
    """

    exit_code: ExitCode
    failure: WorkerFailure | None = None
    detail: str = ""
    gave_up: bool = False
    no_leader: bool = False


class WorkersResult(enum.Enum):
    """The end of the workers of the last round here, for torch's own events and metrics."""

    SUCCEEDED = enum.auto()
    FAILED = enum.auto()


# What a stop leads to.


@dataclass(frozen=True, slots=True)
class Rejoin:
    """After the stop the agent joins the next round."""


@dataclass(frozen=True, slots=True)
class Departure:
    """After the stop the agent leaves. Moments are own monotonic time in seconds.

    Attributes:
        stop_by: The time at which workers that have not stopped at an agreed step are terminated.
        gone_by: The time at which workers that have not ended are killed.
        interrupts: True if a person has interrupted the agent; its workers then get SIGINT before SIGTERM.
    """

    reason: LeaveReason
    detail: str
    stop_by: float
    gone_by: float
    interrupts: bool = False


@dataclass(frozen=True, slots=True)
class Ending:
    """After the stop the agent ends, because the run has ended or because the agent gives up.

    Attributes:
        result: How its workers ended; None if their end is no result.
    """

    outcome: AgentOutcome
    result: WorkersResult | None = None


Then = Rejoin | Departure | Ending


def depart(config: LifecycleConfig, reason: LeaveReason, detail: str, seconds: float | None, now: float) -> Departure:
    """Plan a leave, within `seconds`; None if that is unknown, then workers get `shutdown_timeout` in all."""
    timeout = config.shutdown_timeout if seconds is None else seconds
    stop_by = now + seconds_to_stop(timeout, config.leave_margin)
    if seconds is None:
        return Departure(reason, detail, stop_by, now + timeout)
    # The agent announces its end after its workers' end, and that takes a moment, too.
    gone_by = stop_by + 0.75 * (now + seconds - stop_by) if seconds > 0 else now + _OVERDUE_TIMEOUT
    return Departure(reason, detail, stop_by, gone_by)


@dataclass(frozen=True, slots=True)
class Joining:
    """The agent has no workers and waits for an assignment in the next round.

    Attributes:
        agreed: True if its workers of the last round stopped at the agreed step.
    """

    agreed: bool = False
    spare: bool = False


@dataclass(frozen=True, slots=True)
class Starting:
    """The agent has an assignment, and its workers are being started."""

    round: Assignment


@dataclass(frozen=True, slots=True)
class Training:
    """The workers run.

    Attributes:
        stop_step: The step at which the workers were told to stop; None before.
    """

    round: Assignment
    stop_step: int | None = None
    signalled: bool = False


@dataclass(frozen=True, slots=True)
class Leaving:
    """The agent leaves. Its workers run until the agreed step, or until `departure.stop_by`.

    Attributes:
        untold: What the leader is told when Slurm has not named the cause in time; None once the leave is announced.
        since: The own monotonic time of the signal, while the leave is not announced.
    """

    training: Training
    departure: Departure
    untold: AnnounceLeave | None = None
    since: float = 0.0

    @property
    def round(self) -> Assignment:
        """The assignment of this agent."""
        return self.training.round

    @property
    def signalled(self) -> bool:
        """True after its workers were sent ``--worker-signal``."""
        return self.training.signalled


@dataclass(frozen=True, slots=True)
class Reported:
    """The leader knows how the workers here ended, and decides what comes next.

    Attributes:
        result: How the workers ended; None if their start was interrupted because an event was waiting.
    """

    round: Assignment
    result: WorkersResult | None
    signalled: bool = False


@dataclass(frozen=True, slots=True)
class Stopping:
    """The workers are being stopped.

    Attributes:
        stop_by: The own monotonic time at which workers that still run are killed.
        terminate_at: The own monotonic time at which they get SIGTERM; None if they have got it, or get none.
    """

    round: Assignment
    then: Then
    stop_by: float
    terminate_at: float | None = None
    signalled: bool = False
    agreed: bool = False


@dataclass(frozen=True, slots=True)
class Lingering:
    """The workers have stopped at the agreed step, and the agent leaves when those of the other agents have stopped.

    Until then it serves their store, or leads.
    """

    round: Assignment
    departure: Departure


@dataclass(frozen=True, slots=True)
class Done:
    """The agent has ended.

    Attributes:
        round: Its last assignment; None if it was waiting for one.
    """

    outcome: AgentOutcome
    round: Assignment | None


State = Joining | Starting | Training | Leaving | Reported | Stopping | Lingering | Done


def deadline(state: State) -> float | None:
    """Return when DeadlineReached is due, in own monotonic time; None for never."""
    match state:
        case Stopping(stop_by=stop_by, terminate_at=terminate_at):
            return stop_by if terminate_at is None else min(stop_by, terminate_at)
        case Leaving(departure=departure, untold=AnnounceLeave(), since=since):
            return min(since + ANSWER_TIMEOUT, departure.stop_by)
        case Leaving(departure=departure) | Lingering(departure=departure):
            return departure.stop_by
        case _:
            return None


def is_leaving(state: State) -> bool:
    """Return whether the agent leaves, or stops its workers to leave."""
    return isinstance(state, Leaving | Lingering) or (isinstance(state, Stopping) and isinstance(state.then, Departure))


def round_of(state: State) -> Assignment | None:
    """Return the round that the agent has a place in; None while it joins."""
    return None if isinstance(state, Joining) else state.round


def training_of(state: Training | Leaving) -> Training:
    """Return the workers that train, also while the agent leaves."""
    return state.training if isinstance(state, Leaving) else state


def with_training(state: Training | Leaving, workers: Training) -> Training | Leaving:
    """Return the state with other workers."""
    return replace(state, training=workers) if isinstance(state, Leaving) else workers
