"""The diagnosis why a job was signalled, from the signals and from Slurm's view of the job. Pure functions.

Sources: preempt.html, sbatch(1) on ``--signal``; job_mgr.c and preempt.c of slurmctld, 22.05 to 26.05; and what jobs of
a real 22.05.8 and 24.11.5 looked like.
"""

from __future__ import annotations

import enum
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from slurm_elastic.slurm.output import ClusterConfig, JobView

_WARNINGS = frozenset({signal.SIGUSR1, signal.SIGUSR2})
_EARLY = 60
"""Seconds by which the signal of ``--signal`` may come early (sbatch(1))."""
_LEAST_SAVE, _MOST_SAVE, _SAVE_SHARE = 15.0, 120.0, 20
_KILL_WAIT_FLOOR = 5
"""Minimum of seconds that slurmd waits before SIGKILL, whatever KillWait is (req.c, _rpc_terminate_job)."""


class Cause(enum.Enum):
    """The cause of a signal to a job."""

    PREEMPTED = "preempted"
    """Slurm preempts the job: it is in its grace, or its grace is over without a requeue (PreemptMode=CANCEL)."""
    TIME_LIMIT_NEAR = "time limit near"
    """The warning of ``sbatch --signal``."""
    TIME_LIMIT_REACHED = "time limit reached"
    CANCELLED = "cancelled"
    """scancel, or the job has ended in another way and must not go on."""
    REQUEUED = "requeued"
    """Slurm has requeued the job already: preemption, node failure, or ``scontrol requeue``."""
    NODE_FAILED = "node failed"
    """A node failed, and Slurm does not requeue the job."""
    DRAINED = "drained"
    """The node accepts no more jobs, and a user or administrator signals those that it has."""
    SIGNALLED = "signalled"
    """A user has sent the signal; for Slurm the job could go on."""
    REQUEUE_WANTED = "requeue asked for"
    """A user wants the job to start again: ``slurm-elastic requeue``."""
    UNKNOWN = "unknown"
    """Slurm does not answer, or there was no signal."""


@dataclass(frozen=True, slots=True)
class SignalDefaults:
    """The meaning of signals where Slurm does not answer: settings of the site and the batch script.

    Attributes:
        grace: Seconds between SIGTERM and SIGKILL.
        warning: Seconds in ``sbatch --signal=USR2@<seconds>``.
        save: Seconds that a save before the time limit needs, as the user says; None if the user says nothing.
    """

    grace: float = 30.0
    warning: float = 120.0
    save: float | None = None


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The cause of a signal and the time that is left.

    Attributes:
        seconds: Seconds until Slurm kills the job; None if Slurm will not end it, or if that is unknown.
        detail: The facts behind the diagnosis, for the log.
    """

    cause: Cause
    seconds: float | None
    detail: str

    def __str__(self) -> str:
        left = "" if self.seconds is None else f", {max(0, int(self.seconds))} s left"
        return f"{self.cause.value}{left} ({self.detail})"


_NOTHING = Diagnosis(Cause.UNKNOWN, None, "no signal")


def presume(signals: Sequence[signal.Signals], elapsed: float, meaning: SignalDefaults) -> Diagnosis:
    """Return the diagnosis without an answer of Slurm.

    Args:
        signals: The signals that came, in the order in which this process noted them. It may note two that come within
            a millisecond in either order, so the order of SIGCONT and SIGTERM has no meaning.
        elapsed: Seconds since the newest of them, by the own monotonic clock.
    """
    asked = [number for number in signals if number is not signal.SIGCONT]
    names = ", ".join(dict.fromkeys(number.name for number in asked))
    if signal.SIGTERM in asked:
        return Diagnosis(Cause.UNKNOWN, meaning.grace - elapsed, names)
    if _WARNINGS & set(asked):
        return Diagnosis(Cause.TIME_LIMIT_NEAR, meaning.warning - elapsed, names)
    # SIGINT, SIGHUP and SIGQUIT come from terminals and people, never from Slurm by itself.
    return Diagnosis(Cause.SIGNALLED, None, names) if asked else _NOTHING


def least_grace(config: ClusterConfig, grace: int | None) -> float:
    """Return the seconds that a SIGTERM leaves at the least: KillWait, or GraceTime where that is shorter.

    Args:
        config: Has KillWait.
        grace: GraceTime in seconds of the job's QOS or partition; None or 0 for none.
    """
    kill_wait = max(config.kill_wait, _KILL_WAIT_FLOOR)
    return min(kill_wait, grace) if grace else kill_wait


def save_time(limit: float, newest: float | None, option: float | None) -> tuple[float, str]:
    """Return how many seconds before its time limit a job saves and ends, and what does not fit, empty if all does.

    Args:
        limit: Seconds from the start of the job to its time limit.
        newest: Seconds that the newest save took; None if unknown.
        option: Seconds that the user wants for the save; None if not given.
    """
    # A twentieth of the job for a save of unknown length. The step that runs has to end, too.
    seconds = min(max(_LEAST_SAVE, limit / _SAVE_SHARE), _MOST_SAVE) if newest is None else _LEAST_SAVE + 2 * newest
    source = "a save before the time limit needs"
    if option is not None:
        seconds, source = option, "--warning wants"
    if seconds <= limit / 2:
        return seconds, ""
    fix = "a longer sbatch --time" if option is None else "a longer sbatch --time, or a shorter --warning and --signal"
    return limit / 2, f"{source} {seconds:.0f} s, and the job has {limit:.0f} s: it trains for half of them; set {fix}"


def classify(
    signals: Sequence[signal.Signals],
    elapsed: float,
    view: JobView | None,
    restart_count: int,
    *,
    config: ClusterConfig | None = None,
    meaning: SignalDefaults | None = None,
    grace: int | None = None,
    drained: bool = False,
    save: float = 0.0,
) -> Diagnosis:
    """Return the diagnosis from Slurm's view of the job.

    The function compares only times of the controller with each other; `elapsed` is a duration on this node.

    Args:
        signals, elapsed: As for `presume`.
        view: Slurm's view of the job; None if Slurm does not answer.
        config: Has the controller's time, read after `view`, and KillWait.
        grace: GraceTime in seconds of the QOS or partition, for a job whose end `view` does not have.
        drained: True if Slurm gives no more jobs to the node that was signalled.
        save: Seconds before the time limit at which the job saves and ends without a signal.
    """
    meaning = meaning or SignalDefaults()
    if view is None:
        return presume(signals, elapsed, meaning)
    kill_wait = (meaning.grace if config is None else max(config.kill_wait, _KILL_WAIT_FLOOR)) - elapsed
    if view.restarts > restart_count or view.state == "PENDING":
        return Diagnosis(Cause.REQUEUED, kill_wait, f"{view.state}, Restarts={view.restarts}")
    if view.has_ended:
        return _over(view, kill_wait)
    left = None if config is None or view.end_time is None else float(view.end_time - config.now)
    if view.preempt_time is not None:
        # The job runs until its grace is over.
        if view.end_time is not None:
            seconds, source = max(0.0, float(view.end_time - view.preempt_time)), ""
        elif grace:
            seconds, source = grace, ""
        else:
            # A job that still runs has a grace: without any, Slurm ends it at once.
            seconds, source = meaning.grace, ", as --grace says"
        passed = elapsed if config is None else config.now - view.preempt_time
        return Diagnosis(Cause.PREEMPTED, seconds - passed, f"grace of {seconds:g} s{source}")
    names = ", ".join(dict.fromkeys(number.name for number in signals if number is not signal.SIGCONT))
    # Slurm warns no job without a time limit (job_mgr.c, job_time_limit).
    if _WARNINGS & set(signals) and not view.unlimited and (left is None or left <= meaning.warning + _EARLY):
        return Diagnosis(Cause.TIME_LIMIT_NEAR, meaning.warning - elapsed if left is None else left, names)
    if not names:
        near = left is not None and left <= save
        return Diagnosis(Cause.TIME_LIMIT_NEAR, left, "no signal yet") if near else _NOTHING
    if drained:
        return Diagnosis(Cause.DRAINED, None, names)
    return Diagnosis(Cause.SIGNALLED, None, f"{names}, not by Slurm itself")


def _over(view: JobView, kill_wait: float) -> Diagnosis:
    """Return the diagnosis of a job that is ending; the state COMPLETING hides how it ends."""
    if view.reason == "TimeLimit" or view.state == "TIMEOUT":
        return Diagnosis(Cause.TIME_LIMIT_REACHED, kill_wait, "Reason=TimeLimit")
    if view.reason == "NodeDown" or view.state == "NODE_FAIL":
        return Diagnosis(Cause.NODE_FAILED, kill_wait, f"{view.state}, Reason={view.reason}")
    # When the grace is over, Slurm sets PreemptTime again, to the time of the kill, which is the EndTime (seen with
    # 22.05.8 and 24.11.5). After scancel within the grace PreemptTime is still its beginning.
    is_killed = view.preempt_time is not None and view.end_time is not None and view.preempt_time >= view.end_time
    if view.state == "PREEMPTED" or is_killed:
        return Diagnosis(Cause.PREEMPTED, kill_wait, "its grace is over and it was not requeued")
    return Diagnosis(Cause.CANCELLED, kill_wait, view.state)
