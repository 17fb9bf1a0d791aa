"""What the causes of a signal are to the other agents."""

from __future__ import annotations

from slurm_elastic.rendezvous.membership import LeaveReason
from slurm_elastic.slurm import Cause

__all__ = ["concerns_job", "leave_reason", "wish_of"]

_REASONS = {
    Cause.PREEMPTED: LeaveReason.PREEMPTED,
    Cause.TIME_LIMIT_NEAR: LeaveReason.TIME_LIMIT,
    Cause.TIME_LIMIT_REACHED: LeaveReason.TIME_LIMIT,
    Cause.CANCELLED: LeaveReason.CANCELLED,
    Cause.REQUEUED: LeaveReason.REQUEUED,
    Cause.NODE_FAILED: LeaveReason.CANCELLED,
    Cause.DRAINED: LeaveReason.DRAINED,
    Cause.SIGNALLED: LeaveReason.DRAINED,
    Cause.REQUEUE_WANTED: LeaveReason.REQUEUED,
    # What a SIGTERM that nobody explains means most of the time.
    Cause.UNKNOWN: LeaveReason.PREEMPTED,
}
_OWN = frozenset({Cause.SIGNALLED, Cause.DRAINED, Cause.UNKNOWN})
_WISHES = {LeaveReason.DRAINED: Cause.DRAINED, LeaveReason.REQUEUED: Cause.REQUEUE_WANTED}


def leave_reason(cause: Cause) -> LeaveReason:
    """Why an agent leaves that was signalled for this cause."""
    return _REASONS[cause]


def concerns_job(cause: Cause) -> bool:
    """Whether all agents of the job have to go, and not only the one that was signalled."""
    return cause not in _OWN


def wish_of(reason: LeaveReason) -> Cause | None:
    """What a person wants who asks agents to leave for this reason, None if it is no person's."""
    return _WISHES.get(reason)
