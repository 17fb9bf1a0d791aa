"""Why Slurm, or somebody else, signals this job: from the signals, and from what Slurm says about the job. Pure.

Sources: preempt.html, sbatch(1) on ``--signal``; job_mgr.c and preempt.c of slurmctld, 22.05 to 26.05; and what jobs of
a real 22.05.8 and 24.11.5 looked like.
"""

from __future__ import annotations

import enum
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from slurm_elastic.slurm.scontrol_output import ControllerClock, JobView

__all__ = ["Cause", "Finding", "Meaning", "classify", "presume"]

_WARNINGS = frozenset({signal.SIGUSR1, signal.SIGUSR2})
_EARLY = 60
"""Seconds that ``--signal`` may come early (sbatch(1))."""
_KILL_WAIT_FLOOR = 5
"""slurmd waits so many seconds before SIGKILL whatever KillWait says (req.c, _rpc_terminate_job)."""
_OVER = frozenset({"BOOT_FAIL", "CANCELLED", "COMPLETED", "COMPLETING", "DEADLINE", "FAILED", "NODE_FAIL"}) | {
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "TIMEOUT",
}


class Cause(enum.Enum):
    """Why a job is signalled."""

    PREEMPTED = "preempted"
    """In the grace of a preemption, or at its end without having been requeued (PreemptMode=CANCEL)."""
    TIME_LIMIT_NEAR = "time limit near"
    """The warning of ``sbatch --signal``."""
    TIME_LIMIT_REACHED = "time limit reached"
    CANCELLED = "cancelled"
    """scancel, or the job has ended in another way: nobody wants it to go on."""
    REQUEUED = "requeued"
    """Slurm has requeued the job already, whyever: preempted, a node failed, ``scontrol requeue``."""
    NODE_FAILED = "node failed"
    """A node failed, and Slurm does not requeue the job."""
    DRAINED = "drained"
    """The node takes no more jobs, and somebody signals those that it has."""
    SIGNALLED = "signalled"
    """By hand: the job could go on."""
    REQUEUE_WANTED = "requeue wanted"
    """Somebody wants the job to start again: ``slurm-elastic requeue``."""
    UNKNOWN = "unknown"
    """Slurm says nothing, or nobody has signalled."""


@dataclass(frozen=True, slots=True)
class Meaning:
    """What signals mean as long as Slurm says nothing: what the site and the batch script are configured for.

    Attributes:
        grace: seconds between SIGTERM and the end.
        warning: the time in ``sbatch --signal=USR2@<time>``.
    """

    grace: float = 30.0
    warning: float = 120.0


@dataclass(frozen=True, slots=True)
class Finding:
    """What is known about a signal.

    Attributes:
        cause: why.
        seconds: left until Slurm kills, None if nothing ends by itself or nothing is known.
        detail: the facts behind it, for people.
    """

    cause: Cause
    seconds: float | None
    detail: str

    def __str__(self) -> str:
        left = "" if self.seconds is None else f", {max(0, int(self.seconds))} s left"
        return f"{self.cause.value}{left} ({self.detail})"


_NOTHING = Finding(Cause.UNKNOWN, None, "no signal")


def presume(signals: Sequence[signal.Signals], elapsed: float, meaning: Meaning) -> Finding:
    """Say what signals mean if Slurm is not asked.

    Args:
        signals: that came, in the order in which they were noted. Two that come within a millisecond may be noted in
            either order, so the order of SIGCONT and SIGTERM tells nothing.
        elapsed: seconds since the newest of them, by the own monotonic clock.
        meaning: what they are configured for.
    """
    asked = [number for number in signals if number is not signal.SIGCONT]
    names = ", ".join(dict.fromkeys(number.name for number in asked))
    if signal.SIGTERM in asked:
        return Finding(Cause.UNKNOWN, meaning.grace - elapsed, names)
    if _WARNINGS & set(asked):
        return Finding(Cause.TIME_LIMIT_NEAR, meaning.warning - elapsed, names)
    # SIGINT, SIGHUP and SIGQUIT come from terminals and people, never from Slurm by itself.
    return Finding(Cause.SIGNALLED, None, names) if asked else _NOTHING


def classify(
    signals: Sequence[signal.Signals],
    elapsed: float,
    view: JobView | None,
    restart_count: int,
    *,
    clock: ControllerClock | None = None,
    meaning: Meaning | None = None,
    grace: int | None = None,
    drained: bool = False,
) -> Finding:
    """Say why the job is signalled.

    All times that are compared are the controller's; a time that passed here is measured here.

    Args:
        signals, elapsed: as for `presume`.
        view: of the job, None if Slurm does not answer.
        restart_count: SLURM_RESTART_COUNT of this incarnation.
        clock: the controller's time, asked for after `view`.
        meaning: what signals are configured for, where Slurm does not tell.
        grace: GraceTime of what preempts, in seconds; used where `view` does not tell the job's end.
        drained: whether Slurm gives no more jobs to the node that was signalled.
    """
    meaning = meaning or Meaning()
    if view is None:
        return presume(signals, elapsed, meaning)
    kill_wait = (meaning.grace if clock is None else max(clock.kill_wait, _KILL_WAIT_FLOOR)) - elapsed
    if view.restarts > restart_count or view.state == "PENDING":
        return Finding(Cause.REQUEUED, kill_wait, f"{view.state}, Restarts={view.restarts}")
    if view.state in _OVER:
        return _over(view, kill_wait)
    left = None if clock is None or view.end_time is None else float(view.end_time - clock.now)
    if view.preempt_time is not None:
        return _in_grace(view.preempt_time, view.end_time, elapsed, clock, grace, meaning)
    names = ", ".join(dict.fromkeys(number.name for number in signals if number is not signal.SIGCONT))
    # Slurm warns no job without a time limit (job_mgr.c, job_time_limit).
    if _WARNINGS & set(signals) and not view.unlimited and (left is None or left <= meaning.warning + _EARLY):
        return Finding(Cause.TIME_LIMIT_NEAR, meaning.warning - elapsed if left is None else left, names)
    if not names:
        return _NOTHING
    if drained:
        return Finding(Cause.DRAINED, None, names)
    return Finding(Cause.SIGNALLED, None, f"{names}, not by Slurm itself")


def _in_grace(
    preempt_time: int,
    end_time: int | None,
    elapsed: float,
    clock: ControllerClock | None,
    grace: int | None,
    meaning: Meaning,
) -> Finding:
    """Of a job that runs on until its grace is over."""
    if end_time is not None:
        seconds, source = max(0.0, float(end_time - preempt_time)), ""
    elif grace:
        seconds, source = grace, ""
    else:
        # A job that still runs has some: without any, Slurm ends it at once.
        seconds, source = meaning.grace, ", as --grace says"
    passed = elapsed if clock is None else clock.now - preempt_time
    return Finding(Cause.PREEMPTED, seconds - passed, f"grace of {seconds:g} s{source}")


def _over(view: JobView, kill_wait: float) -> Finding:
    """Of a job that is ending; COMPLETING hides how."""
    if view.reason == "TimeLimit" or view.state == "TIMEOUT":
        return Finding(Cause.TIME_LIMIT_REACHED, kill_wait, "Reason=TimeLimit")
    if view.reason == "NodeDown" or view.state == "NODE_FAIL":
        return Finding(Cause.NODE_FAILED, kill_wait, f"{view.state}, Reason={view.reason}")
    if view.state == "PREEMPTED" or _killed_by_preemption(view):
        return Finding(Cause.PREEMPTED, kill_wait, "its grace is over and it was not requeued")
    return Finding(Cause.CANCELLED, kill_wait, view.state)


def _killed_by_preemption(view: JobView) -> bool:
    """Whether a COMPLETING job was preempted to its end, and not cancelled within its grace.

    When the grace is over, Slurm sets PreemptTime again, to the time of the kill, which is the job's EndTime (seen with
    22.05.8 and 24.11.5). After scancel it still is the beginning of the grace.
    """
    if view.preempt_time is None or view.end_time is None:
        return False
    return view.preempt_time >= view.end_time
