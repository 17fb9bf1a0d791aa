"""The decision whether a job whose run is not finished is requeued. Pure functions.

Sources: scontrol(1) on ``requeue``; preempt.html; job_mgr.c of slurmctld, 22.05 to 26.05. Slurm requeues a preempted
job when its grace is over. If the job exits before that, releases before 24.05 treat it as ended; later releases
requeue it, but hold it after MaxBatchRequeue such exits. ``scontrol requeue`` works at any time, does not count, and
frees the nodes at once.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from slurm_elastic.errors import ExitCode
from slurm_elastic.slurm.cause import Cause
from slurm_elastic.slurm.scontrol_output import JobView

MOST_IDLE = 5
"""Maximum number of starts in a row without progress."""


class Requeue(enum.Enum):
    """The requeue of a job."""

    REQUEST = "request"
    """slurm_elastic requeues the job."""
    SLURM = "slurm"
    """Slurm has requeued the job, or will."""
    NONE = "none"


@dataclass(frozen=True, slots=True)
class RequeueDecision:
    """The decision about a job.

    Attributes:
        requeue: Whether the job is requeued.
        why: Line for the log; empty for none.
        counted: True if the requeue counts for the maximum of requeues after time limits.
    """

    requeue: Requeue
    why: str
    counted: bool = False


@dataclass(frozen=True, slots=True)
class History:
    """The earlier starts of a job.

    Attributes:
        counted: Number of requeues after time limits.
        idle: Number of starts in a row, up to this one, without progress.
    """

    counted: int = 0
    idle: int = 0


def requeue_decision(
    status: int,
    cause: Cause,
    view: JobView | None,
    restart_count: int,
    *,
    warned: bool,
    failed: bool,
    history: History,
    most: int,
) -> RequeueDecision:
    """Decide about a job whose agents have ended and whose run is not finished.

    Args:
        status: Highest exit code of the agents.
        cause: Cause of the signals, by the newest view; UNKNOWN also without signals.
        view: Slurm's view of the job; None if Slurm does not answer.
        restart_count: SLURM_RESTART_COUNT of this start.
        warned: True if the agents got a warning, SIGUSR1 or SIGUSR2.
        failed: True if the run has failed for good.
        history: The earlier starts of the job.
        most: Maximum of requeues after time limits; requeues after preemptions do not count.
    """
    if view is not None and (view.restarts > restart_count or view.state == "PENDING"):
        return RequeueDecision(Requeue.SLURM, f"Slurm has requeued the job{_until(view)}")
    if failed or status in (ExitCode.FINISHED, ExitCode.FAILED, ExitCode.USAGE, ExitCode.FENCED):
        return RequeueDecision(Requeue.NONE, "")
    if view is None:
        return RequeueDecision(Requeue.NONE, "not requeued: Slurm does not answer; submit it again to go on")
    if cause is Cause.CANCELLED:
        return RequeueDecision(Requeue.NONE, "not requeued: the job was cancelled")
    by_hand = cause is Cause.SIGNALLED and warned
    if cause in (Cause.TIME_LIMIT_NEAR, Cause.TIME_LIMIT_REACHED) or by_hand:
        counted, name = True, cause.value
    elif cause in (Cause.PREEMPTED, Cause.REQUEUED, Cause.REQUEUE_WANTED, Cause.NODE_FAILED):
        counted, name = False, cause.value
    else:
        reason = "the job got no signal" if cause is Cause.UNKNOWN else f"the job was {cause.value} by hand"
        return RequeueDecision(Requeue.NONE, f"not requeued: {reason}; submit it again to go on")
    if not view.requeue:
        fix = "submit it with --requeue"
        return RequeueDecision(Requeue.NONE, f"not requeued ({name}): the job does not allow it; {fix}")
    if history.idle >= MOST_IDLE:
        idle = f"{history.idle} starts in a row made no progress"
        return RequeueDecision(Requeue.NONE, f"not requeued ({name}): {idle}; find out why, and submit it again")
    if counted and history.counted >= most:
        limit = f"{history.counted} requeues after time limits, and --max-requeues is {most}"
        return RequeueDecision(Requeue.NONE, f"not requeued ({name}): {limit}")
    return RequeueDecision(Requeue.REQUEST, f"requeued: {name}{_until(view)}", counted)


def _until(view: JobView) -> str:
    return "; it is held, and starts after scontrol release" if view.held else ""
