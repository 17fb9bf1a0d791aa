"""Requeues the job when its part in the run is over: the one place that does, once per incarnation.

Called at the end of the batch script (``slurm-elastic verdict``), or by the agent of the job's first node where the
batch script does not.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from slurm_elastic.agent.patience import Patience
from slurm_elastic.errors import ExitCode
from slurm_elastic.rundir import JobRecords, RunDir
from slurm_elastic.slurm import (
    Cause,
    Controller,
    Finding,
    History,
    JobView,
    Requeue,
    SlurmJob,
    classify,
    requeue_decision,
)

__all__ = ["VERDICT_VARIABLE", "notice_record", "settle"]

VERDICT_VARIABLE = "SLURM_ELASTIC_VERDICT"
"""Set by batch scripts that end with ``slurm-elastic verdict``."""

_WAIT = 600.0
"""Seconds to wait for a slurmctld that does not answer. Meanwhile it gives the nodes to nobody else either."""
_BEGINNING = "round None"
_FINAL = (ExitCode.FINISHED, ExitCode.FAILED, ExitCode.USAGE, ExitCode.FENCED)
_HEARD = (Cause.REQUEUE_WANTED, Cause.DRAINED, Cause.PREEMPTED)
_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 5.0


def notice_record(signals: Sequence[signal.Signals], finding: Finding, progress: int | None) -> dict[str, Any]:
    """What the notice of a job holds: signals, what they were found to mean, and the last checkpoint that is known."""
    return {
        "signals": [number.name for number in signals],
        "cause": finding.cause.name,
        "text": str(finding),
        "progress": progress,
    }


def settle(
    run_dir: RunDir,
    job: SlurmJob,
    status: int,
    *,
    controller: Controller,
    patience: Patience,
    failed: bool,
    say: Callable[[str], None],
    others_go_on: bool = False,
    wait: float = _WAIT,
) -> bool:
    """Decide whether the job is requeued, and do so.

    Args:
        run_dir: of the run, which is not finished.
        job: whose part is over.
        status: highest exit code of its agents.
        controller: to ask.
        patience: what the user said.
        failed: whether the run has failed for good.
        say: takes one line for people.
        others_go_on: whether other agents of the job may be at work, so that it is requeued only if Slurm ends it
            anyway, or a person wants it.
        wait: seconds to wait for a slurmctld that does not answer.

    Returns:
        Whether the job will start again.

    Raises:
        RunDirError: the disk fails.
    """
    restart_count = job.restart_count
    records = JobRecords(run_dir, job.job_id)
    notice = records.notice(restart_count) or {}
    if failed or status in _FINAL or (others_go_on and not notice):
        # Nothing to ask Slurm about.
        return False
    deadline = time.monotonic() + wait
    view = _ask(controller, job.name, deadline)
    signals = _signals(notice)
    # Flags such as SIGNALING hide RUNNING (job_state_string of Slurm).
    runs = view is not None and view.state not in ("PENDING", "COMPLETING")
    clock = controller.clock() if runs else None
    finding = classify(signals, 0.0, view, restart_count, clock=clock, meaning=patience.meaning)
    mark = _mark(run_dir, notice)
    earlier = records.requeues()
    decision = requeue_decision(
        status,
        _cause(notice, finding),
        view,
        restart_count,
        warned=bool({signal.SIGUSR1, signal.SIGUSR2} & set(signals)),
        failed=failed,
        history=History(
            counted=sum(record.get("counted") is True for record in earlier),
            idle=_idle([_BEGINNING, *(record.get("mark") for record in earlier), mark]),
        ),
        most=patience.max_requeues,
    )
    if others_go_on and finding.cause is Cause.SIGNALLED and decision.counted:
        return False
    if decision.who is Requeue.WE:
        if not records.claim_requeue(restart_count, {"why": decision.why, "counted": decision.counted, "mark": mark}):
            return True
        # Said before, as it ends whoever says it.
        say(f"job {job.name}: {decision.why}")
        if _requeue(controller, job, deadline):
            return True
        say(f"job {job.name}: not requeued: scontrol requeue failed; submit it again to go on")
        return False
    if decision.why:
        say(f"job {job.name}: {decision.why}")
    return decision.who is Requeue.SLURM


def _cause(notice: Mapping[str, Any], finding: Finding) -> Cause:
    """Take what the agents heard from a person, or from Slurm, where Slurm says that the job could go on.

    A slurmctld that was killed in the meantime does not know any more that it has preempted the job.
    """
    heard = {cause.name: cause for cause in _HEARD}.get(notice.get("cause", ""))
    return heard if heard is not None and finding.cause in (Cause.SIGNALLED, Cause.UNKNOWN) else finding.cause


def _requeue(controller: Controller, job: SlurmJob, deadline: float) -> bool:
    pause = _FIRST_PAUSE
    while not controller.requeue(job.name):
        silent = controller.is_silent
        view = controller.job(job.name)
        if view is not None and (view.restarts > job.restart_count or view.state == "PENDING"):
            break
        if not silent or time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
    return True


def _ask(controller: Controller, name: str, deadline: float) -> JobView | None:
    pause = _FIRST_PAUSE
    while True:
        view = controller.job(name)
        if view is not None or not controller.is_silent or time.monotonic() > deadline:
            return view
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


def _signals(notice: Mapping[str, Any]) -> tuple[signal.Signals, ...]:
    names = notice.get("signals")
    known = signal.Signals.__members__
    return tuple(known[name] for name in names if name in known) if isinstance(names, list) else ()


def _mark(run_dir: RunDir, notice: Mapping[str, Any]) -> str:
    """Where the run is: the last checkpoint if the trainer tells, else the newest round."""
    progress = notice.get("progress")
    return f"checkpoint {progress}" if progress is not None else f"round {run_dir.last_round()}"


def _idle(marks: list[object]) -> int:
    """How many incarnations at the end of the list left the run where they found it."""
    idle = 0
    for earlier, later in zip(reversed(marks[:-1]), reversed(marks), strict=False):
        if earlier != later:
            break
        idle += 1
    return idle
