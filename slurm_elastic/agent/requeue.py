"""Requeues the job when its part in the run is over: the one place that does, once per incarnation.

:mod:`slurm_elastic.agent.job_end` decides; here are the questions to Slurm and to the run directory, and the effects.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

from slurm_elastic.agent.job_end import RequeueFacts, plan_requeue
from slurm_elastic.agent.option_values import RequeuePolicy
from slurm_elastic.rundir import JobRecords, RunDir
from slurm_elastic.slurm import Controller, JobView, Requeue, SlurmJob

__all__ = ["requeue_job"]

_WAIT = 600.0
"""Seconds to wait for a slurmctld that does not answer. Meanwhile it gives the nodes to no other job either."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 5.0


def requeue_job(
    run_dir: RunDir,
    job: SlurmJob,
    status: int,
    *,
    controller: Controller,
    policy: RequeuePolicy,
    failed: bool,
    say: Callable[[str], None],
    others_go_on: bool = False,
    wait: float = _WAIT,
) -> bool:
    """Requeue the job if it has to go on.

    Called at the end of the batch script (``slurm-elastic verdict``), or by one agent of the job where the batch script
    does not.

    Args:
        run_dir: of the run, which is not finished.
        job: whose part is over.
        status: highest exit code of its agents.
        controller: to ask.
        policy: the user's wishes.
        failed: True if the run has failed for good.
        say: takes one line for people.
        others_go_on: see :class:`~slurm_elastic.agent.job_end.RequeueFacts`.
        wait: seconds to wait for a slurmctld that does not answer.

    Returns:
        True if the job will start again.

    Raises:
        RunDirError: the disk fails.
    """
    restart_count = job.restart_count
    records = JobRecords(run_dir, job.job_id)
    facts = RequeueFacts(status, restart_count, records.notice(restart_count) or {}, failed, others_go_on)
    if not facts.needs_slurm:
        return False
    deadline = time.monotonic() + wait
    view = _ask(controller, job.name, deadline)
    # Flags such as SIGNALING hide RUNNING (job_state_string of Slurm).
    runs = view is not None and view.state not in ("PENDING", "COMPLETING")
    plan = plan_requeue(
        dataclasses.replace(
            facts,
            view=view,
            clock=controller.clock() if runs else None,
            last_round=run_dir.last_round(),
            earlier=records.requeues(),
        ),
        policy.meaning,
        policy.max_requeues,
    )
    decision = plan.decision
    if decision.requeue is Requeue.REQUEST:
        if not records.claim_requeue(restart_count, plan.record):
            return True
        # Said before, as it ends whoever says it.
        say(f"job {job.name}: {decision.why}")
        if _requeue(controller, job, deadline):
            return True
        say(f"job {job.name}: not requeued: scontrol requeue failed; submit it again to go on")
        return False
    if decision.why:
        say(f"job {job.name}: {decision.why}")
    return decision.requeue is Requeue.SLURM


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
