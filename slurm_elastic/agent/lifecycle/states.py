"""The states of the life cycle, and what it depends on: the settings, and how a departure ends.

Moments are own monotonic time in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

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
    """

    agent: str
    node: str
    run_id: str
    leader_host: str
    shutdown_timeout: float
    leave_margin: float
    signals_workers: bool = False


# What a stop leads to.


@dataclass(frozen=True, slots=True)
class Rejoin:
    """After the stop the agent joins the next round."""


@dataclass(frozen=True, slots=True)
class Departure:
    """After the stop the agent leaves.

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
class Done:
    """The agent has ended; after a stop, because the run has ended or because the agent gives up.

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


Then = Rejoin | Departure | Done


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
    """The workers run; those of an agent that leaves until the agreed step, or until `departure.stop_by`.

    Attributes:
        stop_step: The step at which the workers were told to stop; None before.
        signalled: True after the workers were sent ``--worker-signal``.
        departure: How the agent leaves; None if it does not.
        untold: What the leader is told when Slurm has not named the cause in time; None once the leave is announced.
        since: The own monotonic time of the signal, while the leave is not announced.
    """

    round: Assignment
    stop_step: int | None = None
    signalled: bool = False
    departure: Departure | None = None
    untold: AnnounceLeave | None = None
    since: float = 0.0


@dataclass(frozen=True, slots=True)
class Reported:
    """The leader knows how the workers here ended, and decides what comes next.

    Attributes:
        succeeded: True if all ended with exit code 0; None if their start was interrupted as an event was waiting.
    """

    round: Assignment
    succeeded: bool | None
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

    departure: Departure


State = Joining | Starting | Training | Reported | Stopping | Lingering | Done


def deadline(state: State) -> float | None:
    """Return when DeadlineReached is due, in own monotonic time; None for never."""
    match state:
        case Stopping(stop_by=stop_by, terminate_at=terminate_at):
            return stop_by if terminate_at is None else min(stop_by, terminate_at)
        case Training(departure=Departure() as departure, untold=AnnounceLeave(), since=since):
            return min(since + ANSWER_TIMEOUT, departure.stop_by)
        case Training(departure=Departure() as departure) | Lingering(departure=departure):
            return departure.stop_by
        case _:
            return None


def departure_of(state: State) -> Departure | None:
    """Return how the agent leaves, or will when it has stopped its workers; None if it does not."""
    match state:
        case Training(departure=departure) | Lingering(departure=departure):
            return departure
        case Stopping(then=Departure() as departure):
            return departure
    return None
