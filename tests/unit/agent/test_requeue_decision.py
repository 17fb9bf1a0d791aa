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


RUNNING = job("job_running.txt")


def decide(
    cause: Cause,
    view: JobView | None = RUNNING,
    *,
    warned: bool = False,
    counted: int = 0,
    idle: int = 0,
    most: int = 10,
) -> RequeueDecision:
    return requeue_decision(cause, view, 0, warned=warned, counted=counted, idle=idle, most=most)


def test_a_preempted_job_is_requeued_and_not_counted() -> None:
    # In its grace or, with PreemptMode=CANCEL, at its end.
    for name in ("job_preempted_in_grace.txt", "job_preempted_to_its_end.txt"):
        decision = decide(Cause.PREEMPTED, job(name), counted=99, most=0)
        assert decision == RequeueDecision(Requeue.REQUEST, "requeued: preempted", counted=False)


@pytest.mark.parametrize("cause", [Cause.TIME_LIMIT_NEAR, Cause.TIME_LIMIT_REACHED])
def test_a_time_limit_is_counted(cause: Cause) -> None:
    assert decide(cause) == RequeueDecision(Requeue.REQUEST, f"requeued: {cause.value}", counted=True)
    assert decide(cause, counted=2, most=3).requeue is Requeue.REQUEST
    decision = decide(cause, counted=3, most=3)
    assert decision.requeue is Requeue.NONE
    assert decision.why.endswith("3 requeues after time limits, and --max-requeues is 3")


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


def test_never_after_scancel() -> None:
    decision = decide(Cause.CANCELLED, job("job_cancelled.txt"))
    assert decision == RequeueDecision(Requeue.NONE, "not requeued: the job was cancelled")
    assert decide(Cause.CANCELLED, job("job_cancelled.txt"), warned=True).requeue is Requeue.NONE


def test_by_hand() -> None:
    assert decide(Cause.SIGNALLED).why == "not requeued: the job was signalled by hand; submit it again to go on"
    assert decide(Cause.DRAINED).why == "not requeued: the job was drained by hand; submit it again to go on"
    # A warning that came much earlier than configured, or of a user: it asks for a checkpoint and a new start.
    assert decide(Cause.SIGNALLED, warned=True) == RequeueDecision(Requeue.REQUEST, "requeued: signalled", counted=True)
    assert decide(Cause.REQUEUE_WANTED) == RequeueDecision(Requeue.REQUEST, "requeued: requeue asked for")


def test_no_signal() -> None:
    decision = decide(Cause.UNKNOWN)
    assert decision.why == "not requeued: the job got no signal; submit it again to go on"


def test_slurm_may_not_requeue_it() -> None:
    decision = decide(Cause.PREEMPTED, dataclasses.replace(RUNNING, requeue=False))
    assert decision.why == "not requeued (preempted): the job does not allow it; submit it with --requeue"
    assert decision.requeue is Requeue.NONE


def test_slurm_does_not_answer() -> None:
    decision = decide(Cause.TIME_LIMIT_NEAR, None)
    assert decision.why == "not requeued: Slurm does not answer; submit it again to go on"


def test_an_end_to_starts_that_come_to_nothing() -> None:
    assert decide(Cause.PREEMPTED, idle=4).requeue is Requeue.REQUEST
    decision = decide(Cause.PREEMPTED, idle=5)
    assert decision.requeue is Requeue.NONE
    assert "5 starts in a row made no progress" in decision.why
