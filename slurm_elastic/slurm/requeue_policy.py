"""Whether a job that did not finish its run is to be requeued, and by whom. Pure.

Sources: scontrol(1) on ``requeue``; preempt.html; job_mgr.c of slurmctld, 22.05 to 26.05. Slurm requeues a preempted
job when its grace is over. Of one that exits before that, releases before 24.05 think that it has ended; later ones
requeue it, but hold it after MaxBatchRequeue such exits. ``scontrol requeue`` works at any time, is not counted, and
frees the nodes at once.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from slurm_elastic.errors import ExitCode
from slurm_elastic.slurm.cause import Cause
from slurm_elastic.slurm.scontrol_output import JobView

__all__ = ["History", "Requeue", "RequeueDecision", "requeue_decision"]

MOST_IDLE = 5
"""Incarnations in a row that may come to nothing."""


class Requeue(enum.Enum):
    """Who requeues the job."""

    WE = "we"
    SLURM = "slurm"
    """It has, or will."""
    NOBODY = "nobody"


@dataclass(frozen=True, slots=True)
class RequeueDecision:
    """What to do about a job.

    Attributes:
        who: requeues it.
        why: one line for people; empty if there is nothing to say.
        counted: whether it counts against the most requeues after time limits.
    """

    who: Requeue
    why: str
    counted: bool = False


@dataclass(frozen=True, slots=True)
class History:
    """What became of the job's earlier incarnations.

    Attributes:
        counted: how many of them were requeued for a time limit.
        idle: how many in a row up to this one made no progress.
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
        status: highest exit code of the agents.
        cause: why they were told to go, by the newest view; UNKNOWN also if nobody told them.
        view: of the job, None if Slurm does not answer.
        restart_count: SLURM_RESTART_COUNT of this incarnation.
        warned: whether they got a warning, SIGUSR1 or SIGUSR2.
        failed: whether the run has failed for good.
        history: of the job.
        most: requeues after time limits; none for preemptions.
    """
    if view is not None and (view.restarts > restart_count or view.state == "PENDING"):
        return RequeueDecision(Requeue.SLURM, f"Slurm has requeued the job{_until(view)}")
    if failed or status in (ExitCode.FINISHED, ExitCode.FAILED, ExitCode.USAGE, ExitCode.FENCED):
        return RequeueDecision(Requeue.NOBODY, "")
    if view is None:
        return RequeueDecision(Requeue.NOBODY, "not requeued: Slurm does not answer; submit it again to go on")
    if cause is Cause.CANCELLED:
        return RequeueDecision(Requeue.NOBODY, "not requeued: the job was cancelled")
    by_hand = cause is Cause.SIGNALLED and warned
    if cause in (Cause.TIME_LIMIT_NEAR, Cause.TIME_LIMIT_REACHED) or by_hand:
        counted, name = True, cause.value
    elif cause in (Cause.PREEMPTED, Cause.REQUEUED, Cause.REQUEUE_WANTED, Cause.NODE_FAILED):
        counted, name = False, cause.value
    else:
        told = "nobody told the job to go" if cause is Cause.UNKNOWN else f"the job was {cause.value} by hand"
        return RequeueDecision(Requeue.NOBODY, f"not requeued: {told}; submit it again to go on")
    if not view.requeue:
        mend = "submit it with --requeue"
        return RequeueDecision(Requeue.NOBODY, f"not requeued ({name}): the job may not be; {mend}")
    if history.idle >= MOST_IDLE:
        idle = f"{history.idle} starts in a row made no progress"
        return RequeueDecision(Requeue.NOBODY, f"not requeued ({name}): {idle}; look at why, and submit it again")
    if counted and history.counted >= most:
        limit = f"it was {history.counted} times for time limits, and --max-requeues is {most}"
        return RequeueDecision(Requeue.NOBODY, f"not requeued ({name}): {limit}")
    return RequeueDecision(Requeue.WE, f"requeued: {name}{_until(view)}", counted)


def _until(view: JobView) -> str:
    return "; it is held, and starts when somebody calls scontrol release" if view.held else ""
