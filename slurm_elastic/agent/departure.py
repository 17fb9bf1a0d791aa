"""When an agent that leaves stops its workers, and when it is gone."""

from __future__ import annotations

from dataclasses import dataclass

from slurm_elastic.rendezvous.membership import LeaveReason, seconds_to_stop

__all__ = ["Departure", "depart"]

_TOO_LATE = 2.0
"""Seconds that workers get when the time is up already: whoever sends the agent away will end them, or was wrong."""


@dataclass(frozen=True, slots=True)
class Departure:
    """One agent's leave. Moments are own monotonic time in seconds.

    Attributes:
        reason: why.
        detail: the same for a person.
        stop_by: when workers that have not stopped at an agreed step are told to end.
        gone_by: when workers that have not ended are killed.
    """

    reason: LeaveReason
    detail: str
    stop_by: float
    gone_by: float


def depart(
    reason: LeaveReason, detail: str, seconds: float | None, *, shutdown_timeout: float, margin: float, now: float
) -> Departure:
    """Plan a leave.

    Args:
        reason, detail: why.
        seconds: until the agent has to be gone; None if nobody knows, then workers get `shutdown_timeout` in all.
        shutdown_timeout: seconds for workers whose round ends as planned.
        margin: see :func:`~slurm_elastic.rendezvous.membership.seconds_to_stop`.
        now: own monotonic time.
    """
    if seconds is None:
        return Departure(reason, detail, now + seconds_to_stop(shutdown_timeout, margin), now + shutdown_timeout)
    stop_by = now + seconds_to_stop(seconds, margin)
    # The agent says farewell after its workers, and that takes a moment, too.
    gone_by = stop_by + 0.75 * (now + seconds - stop_by) if seconds > 0 else now + _TOO_LATE
    return Departure(reason, detail, stop_by, gone_by)
