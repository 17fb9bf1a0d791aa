"""Why a job is signalled: every situation that Slurm distinguishes, from what scontrol printed in it."""

from __future__ import annotations

import dataclasses
import itertools
import signal
from pathlib import Path
from signal import SIGCONT, SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2

import pytest

from slurm_elastic.slurm import (
    Cause,
    ClusterConfig,
    Diagnosis,
    JobView,
    SignalDefaults,
    classify,
    least_grace,
    presume,
    save_time,
)
from slurm_elastic.slurm.output import parse_config, parse_jobs

OUTPUTS = Path(__file__).parent / "outputs"
KILL_WAIT = 7
MEANING = SignalDefaults(grace=20.0, warning=120.0)


def job(name: str, **changes: object) -> JobView:
    (view,) = parse_jobs((OUTPUTS / name).read_text())
    return dataclasses.replace(view, **changes)


def at(now: int, kill_wait: int = KILL_WAIT) -> ClusterConfig:
    """The controller's answer at that time."""
    return ClusterConfig({"KillWait": f"{kill_wait} sec"}, now)


def config(view: JobView, left: int) -> ClusterConfig:
    """The controller's time when the job has so many seconds left."""
    assert view.end_time is not None
    return at(view.end_time - left)


def find(view: JobView, *signals: signal.Signals, left: int, elapsed: float = 0.0, restarts: int = 0) -> Diagnosis:
    return classify(signals, elapsed, view, restarts, config=config(view, left), meaning=MEANING)


def test_preempted_in_grace() -> None:
    found = find(job("job_preempted_in_grace.txt"), SIGCONT, SIGTERM, left=58, restarts=2)
    assert (found.cause, found.seconds) == (Cause.PREEMPTED, 58)
    assert str(found) == "preempted, 58 s left (grace of 60 s)"


def test_the_grace_alone_tells_how_long_if_the_controllers_time_is_unknown() -> None:
    view = job("job_preempted_in_grace.txt")
    found = classify([SIGTERM], 2.5, view, 2, config=None, meaning=MEANING)
    assert (found.cause, found.seconds) == (Cause.PREEMPTED, 57.5)


@pytest.mark.parametrize("release", ["22.05", "26.05"])
@pytest.mark.parametrize(
    ("grace", "expected"),
    [
        (15, "preempted, 12 s left (grace of 15 s)"),
        # A grace of 0 s is no grace of a job that runs.
        (0, "preempted, 17 s left (grace of 20 s, as --grace says)"),
        (None, "preempted, 17 s left (grace of 20 s, as --grace says)"),
    ],
)
def test_a_grace_whose_end_slurm_does_not_tell_is_never_zero(release: str, grace: int | None, expected: str) -> None:
    view = job(f"job_preempted_without_limit_{release}.txt")
    assert view.preempt_time is not None
    now = at(view.preempt_time + 3)
    # A second SIGTERM does not make it longer.
    for elapsed in (3.0, 0.0):
        found = classify([SIGCONT, SIGTERM], elapsed, view, 0, config=now, meaning=MEANING, grace=grace)
        assert (found.cause, str(found)) == (Cause.PREEMPTED, expected)
    assert classify([SIGTERM], 3.0, view, 0, meaning=MEANING, grace=grace) == found


def test_slurm_warns_no_job_that_has_no_time_limit() -> None:
    view = job("job_preempted_without_limit_26.05.txt", preempt_time=None)
    for now in (at(1795347000), None):
        found = classify([SIGUSR2], 0.0, view, 0, config=now, meaning=MEANING)
        assert (found.cause, found.seconds) == (Cause.SIGNALLED, None)


@pytest.mark.parametrize("warning", [SIGUSR1, SIGUSR2])
@pytest.mark.parametrize("left", [179, 120, 3, -1])
def test_warned_of_the_time_limit(warning: signal.Signals, left: int) -> None:
    # Up to 60 s earlier than asked for (sbatch(1)).
    found = find(job("job_running.txt"), SIGCONT, warning, left=left, restarts=2)
    assert (found.cause, found.seconds) == (Cause.TIME_LIMIT_NEAR, left)


def test_without_the_controllers_time_a_warning_has_its_configured_meaning() -> None:
    found = classify([SIGUSR2], 5.0, job("job_running.txt"), 2, meaning=MEANING)
    assert (found.cause, found.seconds) == (Cause.TIME_LIMIT_NEAR, 115.0)


@pytest.mark.parametrize("number", [SIGUSR1, SIGUSR2, SIGTERM, SIGINT, SIGHUP])
def test_by_hand_in_the_middle_of_a_job(number: signal.Signals) -> None:
    found = find(job("job_running.txt"), number, left=181, restarts=2)
    assert (found.cause, found.seconds) == (Cause.SIGNALLED, None)
    assert str(found) == f"signalled ({number.name}, not by Slurm itself)"


def test_by_hand_on_a_node_that_is_drained() -> None:
    view = job("job_running.txt")
    assert classify([SIGTERM], 0.0, view, 2, config=config(view, 3000), drained=True).cause is Cause.DRAINED


def test_killed_and_requeued_by_slurm() -> None:
    # The end of a preemption, a requeue by somebody, the failure of a node: they look the same and need the same.
    view = job("job_requeued_while_completing.txt")
    found = find(view, SIGCONT, SIGTERM, left=0, elapsed=1.5)
    assert (found.cause, found.seconds) == (Cause.REQUEUED, KILL_WAIT - 1.5)
    assert find(view, SIGTERM, left=0, restarts=1).cause is Cause.CANCELLED


def test_pending_again_already() -> None:
    view = job("job_pending.txt")
    assert classify([SIGTERM], 0.0, view, view.restarts).cause is Cause.REQUEUED


TERMINATED = [SIGTERM, SIGCONT, SIGTERM]
CAUSES = {
    # preempt_send_user_signal: what looks like the warning of a time limit.
    "the user's signal in place of SIGTERM": ("job_preempted_in_grace", [SIGCONT, SIGUSR2], 58, Cause.PREEMPTED),
    "a preemption after the warning": ("job_preempted_in_grace", [SIGUSR2, SIGCONT, SIGTERM], 30, Cause.PREEMPTED),
    "a SIGTERM before the limit is no warning of it": ("job_running", [SIGTERM], 30, Cause.SIGNALLED),
    "a preemption to its end where Slurm cancels": ("job_preempted_to_its_end", TERMINATED, 0, Cause.PREEMPTED),
    "a cancellation within the grace": ("job_cancelled_in_grace", [SIGTERM], 0, Cause.CANCELLED),
    "the time limit": ("job_time_limit", TERMINATED, 0, Cause.TIME_LIMIT_REACHED),
    "a cancellation": ("job_cancelled", [SIGCONT, SIGTERM], 0, Cause.CANCELLED),
}


@pytest.mark.parametrize(("name", "signals", "left", "cause"), CAUSES.values(), ids=CAUSES)
def test_what_it_is(name: str, signals: list[signal.Signals], left: int, cause: Cause) -> None:
    view = job(f"{name}.txt")
    found = find(view, *signals, left=left, elapsed=0.5, restarts=view.restarts)
    assert found.cause is cause
    assert left or found.cause is Cause.CANCELLED or found.seconds == KILL_WAIT - 0.5


def test_an_orphan_of_an_earlier_incarnation() -> None:
    assert find(job("job_running.txt"), SIGTERM, left=3000, restarts=1).cause is Cause.REQUEUED


ENDED = {
    **dict.fromkeys(("COMPLETED", "FAILED", "OUT_OF_MEMORY", "DEADLINE", "BOOT_FAIL", "CANCELLED"), Cause.CANCELLED),
    "NODE_FAIL": Cause.NODE_FAILED,
}


@pytest.mark.parametrize(("state", "cause"), ENDED.items())
def test_a_job_that_has_ended_is_not_wanted_back(state: str, cause: Cause) -> None:
    assert find(job("job_running.txt", state=state), SIGTERM, left=0, restarts=2).cause is cause


def test_a_node_failed_and_slurm_does_not_requeue() -> None:
    assert find(job("job_cancelled.txt", reason="NodeDown"), SIGTERM, left=0).cause is Cause.NODE_FAILED


def test_the_order_in_which_signals_were_noted_changes_nothing() -> None:
    for name in ("job_preempted_in_grace.txt", "job_time_limit.txt", "job_cancelled.txt"):
        view = job(name)
        for signals in itertools.permutations([SIGCONT, SIGTERM, SIGTERM]):
            assert find(view, *signals, left=4, restarts=view.restarts) == find(
                view, SIGCONT, SIGTERM, left=4, restarts=view.restarts
            )


def test_without_slurm_signals_have_their_configured_meaning() -> None:
    for signals in itertools.permutations([SIGCONT, SIGTERM, SIGTERM]):
        assert presume(signals, 1.0, MEANING) == Diagnosis(Cause.UNKNOWN, 19.0, "SIGTERM")
        assert classify(signals, 1.0, None, 0, meaning=MEANING) == Diagnosis(Cause.UNKNOWN, 19.0, "SIGTERM")
    assert presume([SIGCONT, SIGUSR1], 1.0, MEANING) == Diagnosis(Cause.TIME_LIMIT_NEAR, 119.0, "SIGUSR1")
    assert presume([SIGUSR2, SIGTERM], 1.0, MEANING) == Diagnosis(Cause.UNKNOWN, 19.0, "SIGUSR2, SIGTERM")
    assert presume([SIGINT], 1.0, MEANING) == Diagnosis(Cause.SIGNALLED, None, "SIGINT")


def test_nothing_came() -> None:
    assert presume([SIGCONT], 0.0, MEANING).cause is Cause.UNKNOWN
    assert find(job("job_running.txt"), SIGCONT, left=30, restarts=2).cause is Cause.UNKNOWN


def test_slurmd_waits_five_seconds_at_least() -> None:
    view = job("job_cancelled.txt")
    assert view.end_time is not None
    assert classify([SIGTERM], 0.0, view, 0, config=at(view.end_time, 1)).seconds == 5


def test_the_controllers_time() -> None:
    config = parse_config((OUTPUTS / "config.txt").read_text())
    assert config is not None
    assert (config.now, config.kill_wait, config.text("PreemptType")) == (1795282067, 5, "preempt/partition_prio")


# What is presumed, and the time limit.


def test_the_least_grace_is_the_shorter_of_the_two() -> None:
    for kill_wait, grace, least in ((30, 15, 15), (30, 300, 30), (2, 60, 5), (30, 0, 30), (30, None, 30)):
        assert least_grace(at(0, kill_wait), grace) == least


@pytest.mark.parametrize(("limit", "seconds"), [(120, 15), (300, 15), (600, 30), (86400, 120)])
def test_a_job_trains_for_all_but_the_time_of_a_save(limit: int, seconds: float) -> None:
    assert save_time(limit, None, None) == (seconds, "")
    assert save_time(limit, 2.0, None) == (19.0, "")


def test_a_limit_shorter_than_a_save() -> None:
    told = "a save before the time limit needs 215 s, and the job has 300 s: it trains for half of them; "
    assert save_time(300, 100.0, None) == (150.0, told + "set a longer sbatch --time")
    assert save_time(300, 100.0, 20.0) == (20.0, "")


def test_a_time_limit_is_near_without_a_signal() -> None:
    view = job("job_running.txt")
    assert find(view, left=100, restarts=2).cause is Cause.UNKNOWN
    now = config(view, 20)
    assert classify((), 0.0, view, 2, config=now, save=20.0).cause is Cause.TIME_LIMIT_NEAR
