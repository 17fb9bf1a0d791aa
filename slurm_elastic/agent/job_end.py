"""The end of a job's part in its run, decided by pure functions: who requeues the job, and who ends it.

:mod:`slurm_elastic.agent.job_end_effects` asks Slurm and the run directory, and executes. A batch script that ends with
``slurm-elastic verdict`` decides about the requeue by the same functions.

Slurm lets a job whose batch script is gone with the first node run on, and with its last task gone it still does, with
nothing in it. So its last agent ends it.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slurm_elastic.errors import ExitCode
from slurm_elastic.rendezvous.identity import job_of, node_of
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
    # They need msgspec, and the end of a batch script does without.
    from slurm_elastic.rendezvous.election.policy import Successor
    from slurm_elastic.rendezvous.transport.messages import Assignment

__all__ = [
    "JOB_END_VARIABLE",
    "AgentEnd",
    "CancelHeldElements",
    "EndAbandonedJob",
    "EndJobIfLast",
    "JobEndAction",
    "RequeueFacts",
    "RequeueJob",
    "RequeuePlan",
    "can_lose_batch_script",
    "decide_job_end",
    "held_elements",
    "notice_record",
    "other_agents",
    "plan_requeue",
    "represents_job",
]

JOB_END_VARIABLE = "SLURM_ELASTIC_VERDICT"
"""Set by batch scripts that end with ``slurm-elastic verdict``."""

_HELD = "JobHoldMaxRequeue"
"""Slurm requeues a job whose nodes failed, but the fifth time it holds it (MaxBatchRequeue in slurm.conf(5);
job_mgr.c before 23.02). Only an operator of Slurm can release it, while its owner can cancel it."""

_BEGINNING = "round None"
_FINAL = (ExitCode.FINISHED, ExitCode.FAILED, ExitCode.USAGE, ExitCode.FENCED)
_HEARD = (Cause.REQUEUE_WANTED, Cause.DRAINED, Cause.PREEMPTED)


# What an agent does for its job when it ends.


@dataclass(frozen=True, slots=True)
class AgentEnd:
    """An agent that has ended, and its part in its job.

    Attributes:
        exit_code: of the agent.
        gave_up: True if it ended alone, see AgentOutcome.
        diagnoses: True if this is the agent of its job that asked Slurm why the job has to go.
        in_job: True if it runs in a Slurm job.
        leads: True if it led the run to the end.
        represents_job: see the function of that name.
    """

    exit_code: ExitCode
    gave_up: bool = False
    diagnoses: bool = False
    in_job: bool = True
    leads: bool = False
    represents_job: bool = False


@dataclass(frozen=True, slots=True)
class RequeueJob:
    """Requeue the job if it has to go on and its batch script does not see to it; if it will not start again, end it
    as with EndJobIfLast."""


@dataclass(frozen=True, slots=True)
class EndJobIfLast:
    """End the job if its batch script is gone and no other agent of it runs.

    Attributes:
        spares_count: True if agents that are in no round may go on, so that each node of the job counts.
    """

    spares_count: bool = False


@dataclass(frozen=True, slots=True)
class CancelHeldElements:
    """Cancel the elements of the job's array that Slurm holds: the run is finished without them."""


@dataclass(frozen=True, slots=True)
class EndAbandonedJob:
    """End the job if its batch script is gone: the run has ended, and this is the job's last agent."""


JobEndAction = RequeueJob | EndJobIfLast | CancelHeldElements | EndAbandonedJob


def decide_job_end(end: AgentEnd) -> tuple[JobEndAction, ...]:
    """Decide what an agent that has ended still does for its job, in this order."""
    if not end.in_job:
        return ()
    if end.exit_code is ExitCode.LEFT and end.diagnoses:
        return (RequeueJob(),)
    if end.gave_up:
        # On a full disk all agents give up, one after the other; in a partition others may train on.
        return (EndJobIfLast(),)
    if end.exit_code is not ExitCode.LEFT and (end.leads or end.represents_job):
        # The leader ends last.
        finished = end.exit_code is ExitCode.FINISHED
        return (CancelHeldElements(), EndAbandonedJob()) if finished else (EndAbandonedJob(),)
    return ()


def represents_job(job: SlurmJob, agent: str, placed: Assignment | None) -> bool:
    """Return True if this agent sees to the end of its job, as the run was led from another job.

    Otherwise the leader does, which ends last. One agent of each job is enough: the first in the last round.

    Args:
        job: the agent's job.
        agent: its identity.
        placed: its last place; None if it never had one.
    """
    if placed is None or job_of(placed.leader) == job_of(agent):
        return False
    members = set(expand(placed.members))
    return next((node for node in job.job_nodes if node in members), "") == job.node


def can_lose_batch_script(job: SlurmJob, environ: Mapping[str, str]) -> bool:
    """Return True if this agent may outlive its job's batch script: it runs by srun, and not on the script's node."""
    return job.context is Context.STEP and job.node != job.job_nodes[0] and "SLURM_SRUN_COMM_HOST" in environ


def other_agents(
    job: SlurmJob, agent: str, members: Sequence[Successor] | None, told: Sequence[Successor]
) -> list[tuple[str, Successor | None]]:
    """Return the other nodes of the job on which an agent may run, and the agents that are known there.

    Those with a known agent come first: one that lives decides, without a wait for the others.

    Args:
        job: the agent's job.
        agent: its identity.
        members: of the newest round on record; None if that cannot be read, or if agents outside of it count, too.
        told: the members that this agent was told of. They count where `members` is None, and then each other node of
            the job has to be accounted for.
    """
    known = {
        node_of(each.agent): each
        for each in (told if members is None else members)
        if job_of(each.agent) == job_of(agent)
    }
    nodes = job.job_nodes if members is None else tuple(known)
    others = [(node, known.get(node)) for node in nodes if node != job.node]
    return sorted(others, key=lambda other: other[1] is None)


def held_elements(views: Iterable[JobView], array: str) -> list[str]:
    """Return the names of an array's elements that Slurm itself holds. Those that a person holds are left alone."""
    return [f"{array}_{view.array_task_id}" for view in views if view.reason == _HELD]


# Whether the job is requeued.


@dataclass(frozen=True, slots=True)
class RequeueFacts:
    """A job whose part in the run is over, and whose run is not finished.

    Attributes:
        status: highest exit code of its agents.
        restart_count: of this incarnation.
        notice: the notice that its agents have written down; empty if they were not told to leave.
        failed: True if the run has failed for good.
        others_go_on: True if other agents of the job may be at work, so that the job is requeued only if Slurm ends it
            anyway, or a person wants it.
        view: of the job; None if Slurm does not answer.
        clock: the controller's time; None if it was not asked.
        last_round: number of the newest round on record; None before the first.
        earlier: the records of earlier requeues of the job.
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
        """False if the job is not requeued, whatever Slurm says about it."""
        return not (self.failed or self.status in _FINAL or (self.others_go_on and not self.notice))


@dataclass(frozen=True, slots=True)
class RequeuePlan:
    """The decision about a job.

    Attributes:
        decision: the one that requeues it, and the reason.
        record: to be claimed by the one that requeues it.
    """

    decision: RequeueDecision
    record: Mapping[str, Any]


def plan_requeue(facts: RequeueFacts, meaning: SignalDefaults, max_requeues: int) -> RequeuePlan:
    """Decide who requeues the job.

    Args:
        facts: about the job.
        meaning: of signals, where Slurm does not tell.
        max_requeues: how often a job is requeued because of its time limit.
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
            idle=_idle([_BEGINNING, *(record.get("mark") for record in facts.earlier), mark]),
        ),
        most=max_requeues,
    )
    if facts.others_go_on and finding.cause is Cause.SIGNALLED and decision.counted:
        decision = RequeueDecision(Requeue.NONE, "")
    return RequeuePlan(decision, {"why": decision.why, "counted": decision.counted, "mark": mark})


def notice_record(signals: Sequence[signal.Signals], finding: Diagnosis, progress: int | None) -> dict[str, Any]:
    """Return what the notice of a job holds: its signals, their diagnosis, and the last checkpoint that is known."""
    return {
        "signals": [number.name for number in signals],
        "cause": finding.cause.name,
        "text": str(finding),
        "seconds": finding.seconds,
        "progress": progress,
    }


def _cause(notice: Mapping[str, Any], finding: Diagnosis) -> Cause:
    """Take what the agents heard from a person, or from Slurm, where Slurm says that the job could go on.

    A slurmctld that was killed in the meantime does not know any more that it has preempted the job.
    """
    heard = {cause.name: cause for cause in _HEARD}.get(notice.get("cause", ""))
    return heard if heard is not None and finding.cause in (Cause.SIGNALLED, Cause.UNKNOWN) else finding.cause


def _signals(notice: Mapping[str, Any]) -> tuple[signal.Signals, ...]:
    names = notice.get("signals")
    known = signal.Signals.__members__
    return tuple(known[name] for name in names if name in known) if isinstance(names, list) else ()


def _mark(notice: Mapping[str, Any], last_round: int | None) -> str:
    """Return how far the run is: the last checkpoint if the trainer reports it, else the newest round."""
    progress = notice.get("progress")
    return f"checkpoint {progress}" if progress is not None else f"round {last_round}"


def _idle(marks: list[object]) -> int:
    """Count the incarnations at the end of the list that left the run where they found it."""
    idle = 0
    for earlier, later in zip(reversed(marks[:-1]), reversed(marks), strict=False):
        if earlier != later:
            break
        idle += 1
    return idle
