from __future__ import annotations

import pytest

pytest.importorskip("textual")

from slurm_elastic.cli._top_view import StepTimes, advance, sparkline
from slurm_elastic.observe.views import AgentView, LiveAgent, LiveWorker, RunState, RunStatus

A = "n1/7.0/1"


def status(steps: int, since: float = 0.0, round_: int = 0) -> RunStatus:
    ahead = LiveWorker(0, steps=steps + 5, step_seconds=0.0)
    slowest = LiveWorker(1, steps=steps, step_seconds=since)
    live = LiveAgent("training", round=round_, workers=(ahead, slowest))
    return RunStatus("7", "", RunState.RUNNING, agents=(AgentView("n1", "7", A, "training", 0, round_, live=live),))


def trend(*samples: tuple[float, RunStatus]) -> tuple[float, ...]:
    trends: dict[str, StepTimes] = {}
    for now, answer in samples:
        trends = advance(trends, answer, now)
    return trends[A].seconds


def test_the_time_of_a_step_is_that_between_two_answers_by_the_steps_of_the_slowest_worker() -> None:
    assert trend((10.0, status(100)), (12.0, status(104))) == (0.5,)
    # The last step ended 0.4 s before the answer.
    assert trend((10.0, status(100)), (12.0, status(104, 0.4))) == pytest.approx((0.4,))


def test_a_step_longer_than_the_interval_counts_whole() -> None:
    assert trend((10.0, status(1)), (12.0, status(1, 2.0)), (20.0, status(2))) == (10.0,)


def test_another_round_begins_anew_and_keeps_the_picture() -> None:
    samples = [(10.0, status(100)), (12.0, status(104)), (20.0, status(4, round_=1)), (21.0, status(8, round_=1))]
    assert trend(*samples) == (0.5, 0.25)


def test_an_agent_that_does_not_answer_any_more_is_left_out() -> None:
    before = advance({}, status(1), 1.0)
    assert advance(before, RunStatus("7", "", RunState.RUNNING), 2.0) == {}


@pytest.mark.parametrize(("values", "shown"), [((), ""), ((0.0, 0.0), "▁▁"), ((1.0,), "█"), ((0.5, 1.0, 2.0), "▃▅█")])
def test_the_highest_block_is_the_longest_step_shown(values: tuple[float, ...], shown: str) -> None:
    assert sparkline(values) == shown
