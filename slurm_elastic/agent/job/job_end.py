"""Decides who requeues and who ends a job whose part in the run is over. Pure functions.

:mod:`slurm_elastic.agent.job.job_end_effects` asks Slurm and the run directory, and executes. A batch script that
ends with ``slurm-elastic verdict`` decides about the requeue by the same functions.

A job whose batch script was lost with the first node runs on, even when its last task has ended. So its last agent ends
the job.
"""

from __future__ import annotations

import enum
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slurm_elastic.errors import ExitCode
from slurm_elastic.rendezvous.membership.agents import job_of, node_of
from slurm_elastic.slurm import (
    Cause,
    Context,
    ControllerClock,
    Diagnosis,
    History,
    JobView,
    Requeue,
    RequeueDecision,
    SignalDefaults,
    SlurmJob,
    classify,
    expand,
    requeue_decision,
)

if TYPE_CHECKING:
    from slurm_elastic.rendezvous.transport.messages import Assignment, Successor


_HELD = "JobHoldMaxRequeue"
"""Slurm requeues a job whose nodes failed, but the fifth time it holds it (MaxBatchRequeue in slurm.conf(5);
job_mgr.c before 23.02). Only an operator of Slurm can release it, while its owner can cancel it."""

_FIRST_MARK = "round None"
_FINAL = (ExitCode.FINISHED, ExitCode.FAILED, ExitCode.USAGE, ExitCode.FENCED)
_TRUSTED_NOTICES = (Cause.REQUEUE_WANTED, Cause.DRAINED, Cause.PREEMPTED, Cause.TIME_LIMIT_NEAR)


# What an agent does for its job when it ends.


@dataclass(frozen=True, slots=True)
class AgentEnd:
    """An agent that has ended, and its part in its job.

    Attributes:
        exit_code: The exit code of the agent.
        gave_up: True if it ended alone, see AgentOutcome.
        diagnoses: True if this is the agent of its job that has asked Slurm why the job has to end.
        in_job: True if it runs in a Slurm job.
        leads: True if it led the run to the end.
        shares_run: True if agents of other jobs may belong to the run.
        represents_job: The result of the function of that name.
    """

    exit_code: ExitCode
    gave_up: bool = False
    diagnoses: bool = False
    in_job: bool = True
    leads: bool = False
    shares_run: bool = False
    represents_job: bool = False


class JobEndAction(enum.Enum):
    """An action of an agent that has ended, for its job."""

    REQUEUE_JOB = enum.auto()
    """Requeue the job if it has to go on and its batch script does not requeue it. If it will not start again, continue
    as with END_JOB_IF_LAST, with agents that are in no round."""
    END_JOB_IF_LAST = enum.auto()
    """End the job if its batch script is gone and no other agent of it runs."""
    CANCEL_HELD_ELEMENTS = enum.auto()
    """Cancel the elements of the job's array that Slurm holds: the run is finished without them."""
    END_EMPTY_JOBS = enum.auto()
    """End the other jobs of the run whose batch scripts are gone: their last agents may be, too, unknown to Slurm."""
    END_ABANDONED_JOB = enum.auto()
    """End the job if its batch script is gone: the run has ended, and this is the job's last agent."""


def decide_job_end(end: AgentEnd) -> tuple[JobEndAction, ...]:
    """Return what an agent that has ended still does for its job, in this order."""
    if not end.in_job:
        return ()
    if end.exit_code is ExitCode.LEFT and end.diagnoses:
        return (JobEndAction.REQUEUE_JOB,)
    if end.gave_up:
        # On a full disk all agents give up, one after the other; in a network partition others may train on.
        return (JobEndAction.END_JOB_IF_LAST,)
    if end.exit_code is not ExitCode.LEFT and (end.leads or end.represents_job):
        # The leader ends last.
        finished = end.exit_code is ExitCode.FINISHED and end.shares_run
        return (
            *((JobEndAction.CANCEL_HELD_ELEMENTS,) if finished else ()),
            *((JobEndAction.END_EMPTY_JOBS,) if end.leads and end.shares_run else ()),
            JobEndAction.END_ABANDONED_JOB,
        )
    return ()


def represents_job(job: SlurmJob, agent: str, assignment: Assignment | None) -> bool:
    """Return True if this agent handles the end of its job, because the leader of the run is in another job.

    In the leader's own job the leader does that, as it ends last. In other jobs it is the first agent in the last
    round.

    Args:
        job: The agent's job.
        agent: The identity of the agent.
        assignment: Its last assignment; None if it never had one.
    """
    if assignment is None or job_of(assignment.leader) == job_of(agent):
        return False
    members = set(expand(assignment.members))
    return next((node for node in job.job_nodes if node in members), "") == job.node


def can_lose_batch_script(job: SlurmJob, environ: Mapping[str, str]) -> bool:
    """Return True if this agent may outlive its job's batch script: it runs by srun, and not on the script's node."""
    return job.context is Context.STEP and job.node != job.job_nodes[0] and "SLURM_SRUN_COMM_HOST" in environ


def other_agents(
    job: SlurmJob, agent: str, members: Sequence[Successor] | None, successors: Sequence[Successor]
) -> list[tuple[str, Successor | None]]:
    """Return the other nodes of the job on which an agent may run, and the agents that are known there.

    Nodes with a known agent come first: if one of them lives, no other node has to be asked.

    Args:
        job: The agent's job.
        agent: The identity of the agent.
        members: The members of the newest round on record; None if that cannot be read, or if agents outside of it
            count, too.
        successors: The members that the leader has named to this agent; used if `members` is None. Then all other nodes
            of the job count.
    """
    by_node = {
        node_of(successor.agent): successor
        for successor in (successors if members is None else members)
        if job_of(successor.agent) == job_of(agent)
    }
    nodes = job.job_nodes if members is None else tuple(by_node)
    others = [(node, by_node.get(node)) for node in nodes if node != job.node]
    return sorted(others, key=lambda other: other[1] is None)


def held_elements(views: Iterable[JobView], array: str) -> list[str]:
    """Return the names of an array's elements that Slurm itself holds, without those that a person holds."""
    return [f"{array}_{view.array_task_id}" for view in views if view.reason == _HELD]


def is_without_script(view: JobView) -> bool:
    """Return True if a job runs whose batch script is gone: Slurm has taken its node away from the job.

    Such a job ends with its last agent, which ends it. Where that agent's node has failed too, and is back before
    SlurmdTimeout, Slurm takes its task for one that runs (seen with 22.05).
    """
    return view.state == "RUNNING" and view.batch_host != "" and view.batch_host not in view.nodes


# Whether the job is requeued.


@dataclass(frozen=True, slots=True)
class RequeueFacts:
    """A job whose part in the run is over, and whose run is not finished.

    Attributes:
        status: The highest exit code of its agents.
        restart_count: The restart count of this incarnation.
        notice: The notice that its agents have recorded; empty if they were not told to leave.
        failed: True if the run has failed for good.
        others_go_on: True if other agents of the job may still train, so that the job is requeued only if Slurm ends it
            anyway, or a person has requested it.
        view: Slurm's view of the job; None if Slurm does not answer.
        clock: The controller's time; None if it was not asked.
        last_round: The number of the newest round on record; None before the first.
        earlier: The records of earlier requeues of the job.
    """

    status: int
    restart_count: int
    notice: Mapping[str, Any]
    failed: bool = False
    others_go_on: bool = False
    view: JobView | None = None
    clock: ControllerClock | None = None
    last_round: int | None = None
    earlier: Sequence[Mapping[str, Any]] = ()

    @property
    def needs_slurm(self) -> bool:
        """False if the job is not requeued, whatever Slurm reports about it."""
        return not (self.failed or self.status in _FINAL or (self.others_go_on and not self.notice))


@dataclass(frozen=True, slots=True)
class RequeuePlan:
    """The decision about a job.

    Attributes:
        decision: Who requeues it, and the reason.
        record: The record that the process which requeues it claims.
    """

    decision: RequeueDecision
    record: Mapping[str, Any]


def plan_requeue(facts: RequeueFacts, meaning: SignalDefaults, max_requeues: int) -> RequeuePlan:
    """Decide who requeues the job.

    Args:
        facts: The facts about the job.
        meaning: The meaning of signals for which Slurm gives no reason.
        max_requeues: How often a job is requeued because of its time limit, at most.
    """
    signals = _signals(facts.notice)
    finding = classify(signals, 0.0, facts.view, facts.restart_count, clock=facts.clock, meaning=meaning)
    mark = _mark(facts.notice, facts.last_round)
    decision = requeue_decision(
        facts.status,
        _cause(facts.notice, finding),
        facts.view,
        facts.restart_count,
        warned=bool({signal.SIGUSR1, signal.SIGUSR2} & set(signals)),
        failed=facts.failed,
        history=History(
            counted=sum(record.get("counted") is True for record in facts.earlier),
            idle=_idle([_FIRST_MARK, *(record.get("mark") for record in facts.earlier), mark]),
        ),
        most=max_requeues,
    )
    if facts.others_go_on and finding.cause is Cause.SIGNALLED and decision.counted:
        decision = RequeueDecision(Requeue.NONE, "")
    return RequeuePlan(decision, {"why": decision.why, "counted": decision.counted, "mark": mark})


def notice_record(signals: Sequence[signal.Signals], finding: Diagnosis, progress: int | None) -> dict[str, Any]:
    """Return the content of a job's notice: its signals, their diagnosis, and the step of the last checkpoint."""
    return {
        "signals": [number.name for number in signals],
        "cause": finding.cause.name,
        "text": str(finding),
        "seconds": finding.seconds,
        "progress": progress,
    }


def _cause(notice: Mapping[str, Any], finding: Diagnosis) -> Cause:
    """Return the cause in the agents' notice, if that is from Slurm or a person, and Slurm names no other one now.

    A slurmctld that was killed in the meantime does not know any more that it has preempted the job.
    """
    noted = {cause.name: cause for cause in _TRUSTED_NOTICES}.get(notice.get("cause", ""))
    return noted if noted is not None and finding.cause in (Cause.SIGNALLED, Cause.UNKNOWN) else finding.cause


def _signals(notice: Mapping[str, Any]) -> tuple[signal.Signals, ...]:
    names = notice.get("signals")
    members = signal.Signals.__members__
    return tuple(members[name] for name in names if name in members) if isinstance(names, list) else ()


def _mark(notice: Mapping[str, Any], last_round: int | None) -> str:
    """Return the progress of the run: the last checkpoint if the trainer reports it, else the newest round."""
    progress = notice.get("progress")
    return f"checkpoint {progress}" if progress is not None else f"round {last_round}"


def _idle(marks: list[object]) -> int:
    """Count the incarnations at the end of the list in which the run made no progress."""
    idle = 0
    for earlier, later in zip(reversed(marks[:-1]), reversed(marks), strict=False):
        if earlier != later:
            break
        idle += 1
    return idle
