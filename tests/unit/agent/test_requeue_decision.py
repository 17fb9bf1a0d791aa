from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from slurm_elastic.agent.job.job_end import Requeue, RequeueDecision, requeue_decision
from slurm_elastic.slurm import Cause, JobView
from slurm_elastic.slurm.output import parse_jobs

OUTPUTS = Path(__file__).parents[1] / "slurm" / "outputs"


def job(name: str, **changes: object) -> JobView:
    (view,) = parse_jobs((OUTPUTS / name).read_text())
    return dataclasses.replace(view, restarts=0, **changes)


RUNNING, CANCELLED = job("job_running.txt"), job("job_cancelled.txt")
AGAIN = "; submit it again to go on"


def left_alone(why: str) -> RequeueDecision:
    return RequeueDecision(Requeue.NONE, why)


def decide(
    cause: Cause,
    view: JobView | None = RUNNING,
    *,
    warned: bool = False,
    counted: int = 0,
    most: int = 10,
) -> RequeueDecision:
    return requeue_decision(cause, view, 0, warned=warned, counted=counted, idle=0, most=most)


def test_a_preempted_job_is_requeued_and_not_counted() -> None:
    # In its grace or, with PreemptMode=CANCEL, at its end.
    for name in ("job_preempted_in_grace.txt", "job_preempted_to_its_end.txt"):
        decision = decide(Cause.PREEMPTED, job(name), counted=99, most=0)
        assert decision == RequeueDecision(Requeue.REQUEST, "requeued: preempted", counted=False)


@pytest.mark.parametrize("cause", [Cause.TIME_LIMIT_NEAR, Cause.TIME_LIMIT_REACHED])
def test_a_time_limit_is_counted(cause: Cause) -> None:
    assert decide(cause) == RequeueDecision(Requeue.REQUEST, f"requeued: {cause.value}", counted=True)


def test_what_slurm_requeued_is_left_to_it() -> None:
    for state in ("COMPLETING", "PENDING", "RUNNING"):
        view = dataclasses.replace(RUNNING, state=state, restarts=1)
        assert decide(Cause.REQUEUED, view).requeue is Requeue.SLURM


def test_it_is_said_that_a_held_job_does_not_start_by_itself() -> None:
    held = dataclasses.replace(RUNNING, held=True)
    decision = decide(Cause.PREEMPTED, held)
    assert decision.requeue is Requeue.REQUEST
    assert decision.why == "requeued: preempted; it is held, and starts after scontrol release"
    requeued = dataclasses.replace(held, restarts=1, state="PENDING")
    assert decide(Cause.REQUEUED, requeued).why.endswith("starts after scontrol release")


@pytest.mark.parametrize(
    ("cause", "view", "warned", "decision"),
    [
        (Cause.CANCELLED, CANCELLED, False, left_alone("not requeued: the job was cancelled")),
        (Cause.CANCELLED, CANCELLED, True, left_alone("not requeued: the job was cancelled")),
        (Cause.SIGNALLED, RUNNING, False, left_alone(f"not requeued: the job was signalled by hand{AGAIN}")),
        (Cause.DRAINED, RUNNING, False, left_alone(f"not requeued: the job was drained by hand{AGAIN}")),
        # A warning that came much earlier than configured, or of a user: it asks for a checkpoint and a new start.
        (Cause.SIGNALLED, RUNNING, True, RequeueDecision(Requeue.REQUEST, "requeued: signalled", counted=True)),
        (Cause.REQUEUE_WANTED, RUNNING, False, RequeueDecision(Requeue.REQUEST, "requeued: requeue asked for")),
        (Cause.UNKNOWN, RUNNING, False, left_alone(f"not requeued: the job got no signal{AGAIN}")),
        (Cause.TIME_LIMIT_NEAR, None, False, left_alone(f"not requeued: Slurm does not answer{AGAIN}")),
        (
            Cause.PREEMPTED,
            dataclasses.replace(RUNNING, requeue=False),
            False,
            left_alone("not requeued (preempted): the job does not allow it; submit it with --requeue"),
        ),
    ],
)
def test_what_else_decides(cause: Cause, view: JobView | None, warned: bool, decision: RequeueDecision) -> None:
    assert decide(cause, view, warned=warned) == decision
