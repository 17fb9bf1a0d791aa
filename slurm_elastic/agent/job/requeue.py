"""Requeues a job whose part in the run is over, once per incarnation; no other module does.

:mod:`slurm_elastic.agent.job.job_end` decides; this module asks Slurm and the run directory, and executes.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

from slurm_elastic.agent.job.job_end import RequeueFacts, plan_requeue
from slurm_elastic.agent.job.run_history import read_events, read_history
from slurm_elastic.agent.option_values import RequeuePolicy
from slurm_elastic.errors import ExitCode
from slurm_elastic.failures import bad_domains, bad_nodes, exclusion, node_domains, nodes_to_exclude, strikes
from slurm_elastic.rundir import JobRecords, RunDir
from slurm_elastic.slurm import Cause, Controller, JobView, Requeue, SlurmJob, classify

_EXIT_CODE = f"; exit code {ExitCode.LEFT.value}, in srun's words, is that of agents that have left"
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
        run_dir: The directory of the run, which is not finished.
        job: The job whose part in the run is over.
        status: The highest exit code of its agents.
        controller: Slurm's controller.
        policy: The user's requeue policy.
        failed: True if the run has failed for good.
        say: Prints one line for people.
        others_go_on: See :class:`~slurm_elastic.agent.job.job_end.RequeueFacts`.
        wait: Seconds to wait for a slurmctld that does not answer.

    Returns:
        True if the job will start again.

    Raises:
        RunDirError: The run directory cannot be read or written.
    """
    restart_count = job.restart_count
    records = JobRecords(run_dir, job.job_id)
    facts = RequeueFacts(status, restart_count, records.notice(restart_count) or {}, failed, others_go_on)
    if not facts.needs_slurm:
        return False
    deadline = time.monotonic() + wait
    view = _ask(controller, job.name, deadline)
    # Flags such as SIGNALING hide RUNNING (job_state_string of Slurm).
    runs = view is not None and view.state != "PENDING" and not view.has_ended
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
        ours = _excluded_before(records)
        bad = _room(
            struck_nodes(run_dir, policy.max_excluded, lambda line: say(f"job {job.name}: {line}")),
            *(controller, job, view, ours),
        )
        if not records.claim_requeue(restart_count, {**plan.record, "excluded": list(bad)}):
            return True
        # Printed before the requeue, which ends this process, too.
        say(f"job {job.name}: {decision.why}{_EXIT_CODE if facts.status == ExitCode.LEFT else ''}")
        why_not = _requeue(controller, job, deadline, if_running=runs)
        if why_not:
            say(f"job {job.name}: not requeued: {why_not}; submit it again to go on")
            return False
        _exclude(controller, job, view, ours, bad, say)
        return True
    if decision.why:
        say(f"job {job.name}: {decision.why}")
    return decision.requeue is Requeue.SLURM


def struck_nodes(run_dir: RunDir, most: int, say: Callable[[str], None] = lambda _: None) -> tuple[str, ...]:
    """Return the nodes that have strikes, by the events of all starts of the run; say which domains have several."""
    if not most:
        return ()
    bad = bad_nodes(strikes(read_events(run_dir)), time.time())
    if not bad:
        return ()
    domains = node_domains(read_history(run_dir))
    for domain, number in bad_domains(bad, domains).items():
        say(f"{number} nodes of failure domain {domain} are bad: look at what they share, such as a switch")
    return nodes_to_exclude(bad, domains, most)


def _room(
    bad: tuple[str, ...], controller: Controller, job: SlurmJob, view: JobView | None, ours: frozenset[str]
) -> tuple[str, ...]:
    """Return as many of the bad nodes as the partition can spare: with too few nodes left the job would never start."""
    if not bad or view is None:
        return ()
    partition = next(
        (candidate for candidate in controller.partitions() or () if candidate.name == view.partition), None
    )
    if partition is None:
        return ()
    users = [node for node in view.excluded if node not in ours]
    return bad[: max(0, partition.nodes - len(users) - len(job.job_nodes))]


def _excluded_before(records: JobRecords) -> frozenset[str]:
    """Return the nodes that earlier requeues have added to those that the job excludes."""
    lists = [record.get("excluded") for record in records.requeues()]
    return frozenset(node for names in lists if isinstance(names, list) for node in names if isinstance(node, str))


def _exclude(
    controller: Controller,
    job: SlurmJob,
    view: JobView | None,
    ours: frozenset[str],
    bad: Sequence[str],
    say: Callable[[str], None],
) -> None:
    present = view.excluded if view is not None else ()
    excluded = exclusion(present, ours, bad)
    if excluded == present:
        return
    fact = f"it excludes {', '.join(excluded) or 'no node'} from now on"
    why = "their strikes are in the events of the run" if bad else "the strikes of others have expired"
    if controller.exclude(job.name, excluded):
        say(f"job {job.name}: {fact}: {why}")
    else:
        say(f"job {job.name}: Slurm did not accept that {fact}; bad nodes: {', '.join(bad)}")


def _requeue(controller: Controller, job: SlurmJob, deadline: float, *, if_running: bool) -> str:
    """Requeue the job; return why Slurm has not, empty if it has."""
    pause = _FIRST_PAUSE
    while True:
        accepted = controller.requeue(job.name, if_running=if_running)
        silent = controller.is_silent
        if accepted and not if_running:
            return ""
        view = controller.job(job.name)
        if view is not None and (view.restarts > job.restart_count or view.state == "PENDING"):
            return ""
        if accepted:
            if view is None or not view.has_ended:
                return ""
            if classify((), 0.0, view, job.restart_count).cause is Cause.CANCELLED:
                return "it was cancelled or has ended meanwhile"
            # Its time limit or another cause that it comes back from has ended it meanwhile.
            if_running = False
            continue
        if not silent or time.monotonic() > deadline:
            return "scontrol requeue failed"
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


def _ask(controller: Controller, name: str, deadline: float) -> JobView | None:
    pause = _FIRST_PAUSE
    while True:
        view = controller.job(name)
        if view is not None or not controller.is_silent or time.monotonic() > deadline:
            return view
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
