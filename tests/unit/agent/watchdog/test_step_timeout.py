from __future__ import annotations

import pytest

from slurm_elastic.agent.watchdog.stalls import HangTimeout, StepWatch, hang_timeout
from slurm_elastic.control.agent_side import WorkerProgress
from slurm_elastic.errors import UsageError


def worker(boundary: int, since: float, *, local_rank: int = 0, stopped: bool = False) -> WorkerProgress:
    return WorkerProgress(local_rank, True, boundary, 100 + boundary, None, since if boundary else None, stopped)


def test_a_worker_hangs_when_its_last_step_is_too_long_ago() -> None:
    watch = StepWatch(HangTimeout(10.0))
    assert watch.check([worker(5, 4.0), worker(4, 7.0, local_rank=1)], 100.0) == ([], 3.0)
    stuck, _ = watch.check([worker(5, 7.0), worker(4, 10.0, local_rank=1)], 103.0)
    assert [(one.local_rank, one.boundary, seconds) for one, seconds in stuck] == [(1, 4, 10.0)]


def test_each_hang_is_told_once() -> None:
    watch = StepWatch(HangTimeout(10.0))
    assert len(watch.check([worker(5, 11.0)], 100.0)[0]) == 1
    assert watch.check([worker(5, 12.0)], 101.0) == ([], 10.0)
    assert len(watch.check([worker(6, 11.0)], 120.0)[0]) == 1
    watch.begin()
    assert len(watch.check([worker(6, 11.0)], 130.0)[0]) == 1


def test_whoever_has_taken_no_step_or_was_told_to_stop_is_not_watched() -> None:
    watch = StepWatch(HangTimeout(10.0))
    assert watch.check([worker(0, 0.0), worker(9, 99.0, stopped=True)], 100.0) == ([], 10.0)
    assert watch.check([], 200.0) == ([], 10.0)


def test_a_worker_that_takes_no_first_step_has_a_time_of_its_own() -> None:
    watch = StepWatch(HangTimeout(10.0, first=60.0))
    alien = WorkerProgress(1, False, 0, None, None, None, False)
    assert watch.check([worker(0, 0.0), alien], 100.0) == ([], 10.0)
    assert watch.check([worker(0, 0.0), alien], 150.0) == ([], 10.0)
    ((stuck, seconds),), _ = watch.check([worker(0, 0.0), alien], 160.0)
    assert (stuck.local_rank, stuck.boundary, seconds) == (0, 0, 60.0)
    assert watch.check([worker(0, 0.0), alien], 170.0) == ([], 10.0)


def test_no_worker_is_blamed_for_the_time_in_which_nobody_was_watched() -> None:
    watch = StepWatch(HangTimeout(10.0))
    assert watch.check([worker(5, 4.0), worker(4, 9.0, local_rank=1)], 100.0) == ([], 1.0)
    # The clock of the workers goes on in a pause of an hour.
    assert watch.check([worker(5, 3604.0), worker(4, 3609.0, local_rank=1)], 100.0) == ([], 1.0)
    # One goes on, the other does not.
    stuck, _ = watch.check([worker(6, 2.0), worker(4, 3611.0, local_rank=1)], 102.0)
    assert [(one.local_rank, seconds) for one, seconds in stuck] == [(1, 11.0)]
    # What has taken a step since then has no more time than before.
    assert len(watch.check([worker(6, 10.5)], 110.5)[0]) == 1


def test_auto_does_not_learn_from_the_time_in_which_nobody_was_watched() -> None:
    watch = StepWatch(HangTimeout())
    watch.check([worker(1, 0.0)], 0.0)
    watch.check([worker(21, 1.0)], 21.0)
    assert watch.check([worker(21, 3601.0)], 21.0)[0] == []
    assert watch.check([worker(22, 0.0)], 22.0)[0] == []
    assert len(watch.check([worker(22, 301.0)], 323.0)[0]) == 1


def test_a_step_before_a_pause_that_was_seen_after_it_is_no_old_one() -> None:
    watch = StepWatch(HangTimeout(10.0))
    assert watch.check([worker(5, 1.0)], 100.0) == ([], 9.0)
    assert watch.check([worker(6, 3602.0)], 104.0) == ([], 6.0)


def test_auto_waits_for_ten_steps_and_never_less_than_five_minutes() -> None:
    watch = StepWatch(HangTimeout())
    assert watch.check([worker(5, 1.0)], 100.0) == ([], float("inf"))
    assert watch.check([worker(9, 1e6)], 104.0)[0] == []
    for since, hanging in ((299.0, 0), (301.0, 1)):
        watch = StepWatch(HangTimeout())
        watch.check([worker(1, 1.0)], 100.0)
        watch.check([worker(20, 1.0)], 119.0)
        assert len(watch.check([worker(21, since)], 500.0)[0]) == hanging


def test_auto_learns_from_the_longest_pause() -> None:
    watch = StepWatch(HangTimeout())
    watch.check([worker(1, 0.0)], 0.0)
    # Sixty seconds each on average.
    watch.check([worker(21, 0.0)], 1200.0)
    assert watch.check([worker(21, 599.0)], 1799.0)[0] == []
    # And now one that took ten minutes, seen while it lasted.
    assert watch.check([worker(22, 0.0)], 1800.0)[0] == []
    assert watch.check([worker(22, 5000.0)], 6800.0)[0] == []
    assert len(StepWatch(HangTimeout()).check([worker(22, 5000.0)], 0.0)[0]) == 0


def test_what_hangs_is_no_measure() -> None:
    watch = StepWatch(HangTimeout())
    watch.check([worker(1, 0.0)], 0.0)
    watch.check([worker(21, 0.0)], 20.0)
    assert len(watch.check([worker(21, 400.0)], 420.0)[0]) == 1
    watch.begin()
    assert len(watch.check([worker(1, 400.0)], 1000.0)[0]) == 1


@pytest.mark.parametrize("text", ["0", "-5", "1e3", "ten", "", "inf", "0.0"])
def test_what_is_no_time_is_named(text: str) -> None:
    with pytest.raises(UsageError, match=r"^--hang-timeout .* is neither seconds, above 0, nor auto or off; write"):
        hang_timeout(text)


def test_what_can_be_said() -> None:
    assert [hang_timeout(text) for text in (None, "off", "auto", "90", "0.5")] == [
        None,
        None,
        HangTimeout(),
        HangTimeout(90.0),
        HangTimeout(0.5),
    ]
