"""Decides who requeues and who ends a job whose part in the run is over. Pure functions.

`job_end_effects` and `requeue` ask Slurm and the run directory, and execute. A job whose batch script was lost with the
first node runs on, even when its last task has ended. So its last agent ends the job.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slurm_elastic.rendezvous.membership.agents import job_of, node_of
from slurm_elastic.slurm import Cause, JobView, SlurmJob, expand

if TYPE_CHECKING:
    from slurm_elastic.rendezvous.transport.messages import Assignment, Successor

_MOST_IDLE = 5
"""Maximum number of starts in a row without progress."""


def represents_job(job: SlurmJob, agent: str, assignment: Assignment | None) -> bool:
    """Return True if this agent handles the end of its job, because the leader of the run is in another job.

    In the leader's own job the leader does that, as it ends last; in others the first agent in the last round.
    """
    if assignment is None or job_of(assignment.leader) == job_of(agent):
        return False
    members = set(expand(assignment.members))
    return next((node for node in job.job_nodes if node in members), "") == job.node


def other_agents(
    job: SlurmJob, agent: str, known: Sequence[Successor], *, all_nodes: bool
) -> list[tuple[str, Successor | None]]:
    """Return the other nodes of the job on which an agent may run, and the agents that are known there.

    Nodes with a known agent come first: if one of them lives, no other node has to be asked. Unless `all_nodes`, only
    those count.
    """
    by_node = {node_of(other.agent): other for other in known if job_of(other.agent) == job_of(agent)}
    nodes = job.job_nodes if all_nodes else tuple(by_node)
    others = [(node, by_node.get(node)) for node in nodes if node != job.node]
    return sorted(others, key=lambda other: other[1] is None)


def is_without_script(view: JobView) -> bool:
    """Return True if a job runs whose batch script is gone: Slurm has taken its node away from the job.

    Such a job ends with its last agent, which ends it. Where that agent's node has failed too, and is back before
    SlurmdTimeout, Slurm takes its task for one that runs (seen with 22.05).
    """
    return view.state == "RUNNING" and view.batch_host != "" and view.batch_host not in view.nodes


# Whether the job is requeued.


@dataclass(frozen=True, slots=True)
class RequeueDecision:
    """The decision about a job, with a line for the log.

    Attributes:
        request: True if slurm_elastic requeues the job.
        by_slurm: True if Slurm has requeued it, or will.
        counted: True if the requeue counts for the maximum of requeues after time limits.
    """

    why: str
    request: bool = False
    by_slurm: bool = False
    counted: bool = False


def requeue_decision(
    cause: Cause, view: JobView | None, restart_count: int, *, warned: bool, counted: int, idle: int, most: int
) -> RequeueDecision:
    """Decide about a job whose agents have left, and whose run has neither finished nor failed.

    Sources: scontrol(1) on ``requeue``; preempt.html; job_mgr.c of slurmctld, 22.05 to 26.05. Slurm requeues a
    preempted job when its grace is over. If the job exits before that, releases before 24.05 treat it as ended; later
    releases requeue it, but hold it after MaxBatchRequeue such exits. ``scontrol requeue`` works at any time, does not
    count, and frees the nodes at once.

    Args:
        cause: Cause of the signals, by the newest view; UNKNOWN also without signals.
        counted: Number of requeues after time limits so far.
        idle: Number of starts in a row, up to this one, without progress.
        most: Maximum of requeues after time limits; requeues after preemptions do not count.
    """
    if view is not None and (view.restarts > restart_count or view.state == "PENDING"):
        return RequeueDecision(f"Slurm has requeued the job{_until(view)}", by_slurm=True)
    if view is None:
        return RequeueDecision("not requeued: Slurm does not answer; submit it again to go on")
    if cause is Cause.CANCELLED:
        return RequeueDecision("not requeued: the job was cancelled")
    by_hand = cause is Cause.SIGNALLED and warned
    counts = by_hand or cause in (Cause.TIME_LIMIT_NEAR, Cause.TIME_LIMIT_REACHED)
    if not counts and cause not in (Cause.PREEMPTED, Cause.REQUEUED, Cause.REQUEUE_WANTED, Cause.NODE_FAILED):
        reason = "the job got no signal" if cause is Cause.UNKNOWN else f"the job was {cause.value} by hand"
        return RequeueDecision(f"not requeued: {reason}; submit it again to go on")
    why_not = ""
    if not view.requeue:
        why_not = "the job does not allow it; submit it with --requeue"
    elif idle >= _MOST_IDLE:
        why_not = f"{idle} starts in a row made no progress; find out why, and submit it again"
    elif counts and counted >= most:
        why_not = f"{counted} requeues after time limits, and --max-requeues is {most}"
    if why_not:
        return RequeueDecision(f"not requeued ({cause.value}): {why_not}")
    return RequeueDecision(f"requeued: {cause.value}{_until(view)}", request=True, counted=counts)


def _until(view: JobView) -> str:
    return "; it is held, and starts after scontrol release" if view.held else ""
