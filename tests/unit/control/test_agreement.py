"""Hold, agree, stop: what the agent and a worker say to each other by the page."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from slurm_elastic.control.agent_side import RoundControl
from slurm_elastic.control.shared_page import BOUNDARY, Fields, map_page
from slurm_elastic.control.worker_side import VARIABLE, Stop, WorkerControl, attach


def pair(directory: Path) -> tuple[RoundControl, WorkerControl]:
    control = RoundControl(directory, 3, 1)
    worker = attach(control.environment(0))
    assert worker is not None
    return control, worker


def page_of(control: RoundControl) -> Fields:
    """The page of the only worker, which nothing has attached to."""
    return map_page(control.environment(0)[VARIABLE])


def test_nothing_is_pending(tmp_path: Path) -> None:
    control, worker = pair(tmp_path)
    assert [worker.ask(), worker.ask(10), worker.ask(11)] == [None] * 3
    worker.report_checkpoint(10)
    (progress,) = control.progress()
    assert (progress.local_rank, progress.attached, progress.boundary) == (0, True, 3)
    assert (progress.step, progress.checkpoint, progress.stopped) == (11, 10, False)
    assert progress.seconds_since_boundary is not None
    assert 0 <= progress.seconds_since_boundary < 60
    assert not all(each.stopped for each in control.progress())


@pytest.mark.parametrize("loss", [0.25, -1e300, float("inf")])
def test_the_loss_and_its_step(tmp_path: Path, loss: float) -> None:
    control, worker = pair(tmp_path)
    worker.ask(10)
    assert (control.progress()[0].loss, control.progress()[0].loss_step) == (None, None)
    worker.report(9, loss)
    assert (control.progress()[0].loss, control.progress()[0].loss_step) == (loss, 9)


def test_before_the_first_step(tmp_path: Path) -> None:
    control = RoundControl(tmp_path, 0, 2)
    assert control.hold() is None
    workers = [attach(control.environment(rank)) for rank in range(2)]
    assert control.hold() == 1
    assert [progress.seconds_since_boundary for progress in control.progress()] == [None, None]
    control.stop_at(1, "preempted")
    assert all(worker is not None and isinstance(worker.ask(), Stop) for worker in workers)
    assert all(each.stopped for each in control.progress())


def test_worker_that_takes_no_part_lets_nobody_wait(tmp_path: Path) -> None:
    control = RoundControl(tmp_path, 0, 2)
    worker = attach(control.environment(0))
    assert worker is not None
    assert control.hold() is None
    assert worker.ask() is None


def test_stop_comes_at_its_step_and_stays(tmp_path: Path) -> None:
    control, worker = pair(tmp_path)
    worker.ask()
    assert control.hold() == 2
    control.stop_at(4, "time_limit", 60.0)
    assert worker.ask() is None
    assert worker.ask() is None
    assert not all(each.stopped for each in control.progress())
    stop = worker.ask()
    assert isinstance(stop, Stop)
    assert stop
    assert stop.reason == "time_limit"
    assert stop.seconds_left is not None
    assert 30 < stop.seconds_left <= 60
    assert all(each.stopped for each in control.progress())
    assert worker.ask() is stop
    assert control.progress()[0].boundary == 4


def test_deadline_moves_and_may_be_missing(tmp_path: Path) -> None:
    control, worker = pair(tmp_path)
    control.hold()
    control.stop_at(1, "drained")
    stop = worker.ask()
    assert stop is not None
    assert stop.seconds_left is None
    control.stop_at(1, "preempted", 0.001)
    assert stop.reason == "drained"
    time.sleep(0.002)
    assert stop.seconds_left == 0.0


def test_agreement_that_is_given_up(tmp_path: Path) -> None:
    control = RoundControl(tmp_path, 0, 1)
    fields = page_of(control)
    worker = WorkerControl(fields, lambda _: control.release())
    assert control.hold() == 1
    assert worker.ask() is None
    assert worker.ask() is None
    with pytest.raises(ValueError, match="earliest None"):
        control.stop_at(3, "preempted")
    assert control.hold() == 3
    control.stop_at(3, "preempted")
    control.release()
    assert worker.ask() is not None


def test_asking_again_gives_the_same_answer(tmp_path: Path) -> None:
    control = RoundControl(tmp_path, 0, 1)
    fields = page_of(control)
    worker = WorkerControl(fields)
    worker.ask()
    assert control.hold() == 2
    fields[BOUNDARY] = 2  # as a worker that waits there
    assert control.hold() == 2
    control.stop_at(5, "drained")
    assert control.hold() == 5


def test_steps_that_cannot_be_kept(tmp_path: Path) -> None:
    control, worker = pair(tmp_path)
    worker.ask()
    with pytest.raises(ValueError, match="cannot stop at 2"):
        control.stop_at(2, "preempted")
    control.hold()
    with pytest.raises(ValueError, match="cannot stop at 1"):
        control.stop_at(1, "preempted")
    control.stop_at(2, "preempted")
    with pytest.raises(ValueError, match="told 2"):
        control.stop_at(3, "preempted")


def test_call_that_a_signal_handler_breaks_off_does_not_count(tmp_path: Path) -> None:
    control = RoundControl(tmp_path, 0, 1)
    fields = page_of(control)

    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    worker = WorkerControl(fields, interrupt)
    control.hold()
    with pytest.raises(KeyboardInterrupt):
        worker.ask()
    control.stop_at(1, "preempted")
    assert worker.ask() is not None


@pytest.mark.parametrize("step", [1.5, "7", None])
def test_step_that_is_no_number(tmp_path: Path, step: object) -> None:
    _, worker = pair(tmp_path)
    with pytest.raises(TypeError):
        worker.report_checkpoint(step)  # type: ignore[arg-type]
