from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from slurm_elastic.agent.job.job_end import RequeueDecision, requeue_decision
from slurm_elastic.slurm import Cause, JobView
from slurm_elastic.slurm.output import parse_jobs

OUTPUTS = Path(__file__).parents[1] / "slurm" / "outputs"


def job(name: str) -> JobView:
    (view,) = parse_jobs((OUTPUTS / name).read_text())
    return dataclasses.replace(view, restarts=0)


RUNNING, CANCELLED = job("job_running.txt"), job("job_cancelled.txt")
HELD = dataclasses.replace(RUNNING, held=True)
AGAIN = "; submit it again to go on"


def left_alone(why: str) -> RequeueDecision:
    return RequeueDecision(why)


def again(why: str, *, counted: bool = False) -> RequeueDecision:
    return RequeueDecision(f"requeued: {why}", request=True, counted=counted)


@pytest.mark.parametrize(
    ("cause", "view", "warned", "decision"),
    [
        (Cause.TIME_LIMIT_NEAR, RUNNING, False, again("time limit near", counted=True)),
        (Cause.TIME_LIMIT_REACHED, RUNNING, False, again("time limit reached", counted=True)),
        (Cause.PREEMPTED, HELD, False, again("preempted; it is held, and starts after scontrol release")),
        (
            Cause.REQUEUED,
            dataclasses.replace(HELD, restarts=1),
            False,
            RequeueDecision("Slurm has requeued the job; it is held, and starts after scontrol release", by_slurm=True),
        ),
        (Cause.CANCELLED, CANCELLED, False, left_alone("not requeued: the job was cancelled")),
        (Cause.CANCELLED, CANCELLED, True, left_alone("not requeued: the job was cancelled")),
        (Cause.SIGNALLED, RUNNING, False, left_alone(f"not requeued: the job was signalled by hand{AGAIN}")),
        (Cause.DRAINED, RUNNING, False, left_alone(f"not requeued: the job was drained by hand{AGAIN}")),
        # A warning that came much earlier than configured, or of a user: it asks for a checkpoint and a new start.
        (Cause.SIGNALLED, RUNNING, True, again("signalled", counted=True)),
        (Cause.REQUEUE_WANTED, RUNNING, False, again("requeue asked for")),
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
def test_the_cause_decides(cause: Cause, view: JobView | None, warned: bool, decision: RequeueDecision) -> None:
    assert requeue_decision(cause, view, 0, warned=warned, counted=0, idle=0, most=10) == decision


def test_requeues_after_preemptions_have_no_limit() -> None:
    decision = requeue_decision(Cause.PREEMPTED, RUNNING, 0, warned=False, counted=99, idle=0, most=0)
    assert decision == again("preempted")
