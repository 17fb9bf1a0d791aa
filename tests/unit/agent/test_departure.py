from __future__ import annotations

import pytest

from slurm_elastic.agent.departure import Departure, depart
from slurm_elastic.rendezvous.membership import LeaveReason

WHY = (LeaveReason.PREEMPTED, "SIGTERM")


def plan(seconds: float | None) -> Departure:
    return depart(*WHY, seconds, shutdown_timeout=30.0, margin=5.0, now=100.0)


def test_without_a_deadline_workers_have_their_usual_time_in_all() -> None:
    assert plan(None) == Departure(*WHY, stop_by=125.0, gone_by=130.0)


def test_workers_are_killed_before_the_deadline() -> None:
    assert plan(60.0) == Departure(*WHY, stop_by=155.0, gone_by=158.75)


@pytest.mark.parametrize("seconds", [0.1, 1.0, 4.0, 9.0])
def test_a_short_time_is_shared(seconds: float) -> None:
    departure = plan(seconds)
    assert departure.stop_by == 100.0 + seconds / 2
    assert departure.stop_by < departure.gone_by < 100.0 + seconds


def test_a_deadline_that_is_past_leaves_a_moment() -> None:
    assert plan(-3.0) == Departure(*WHY, stop_by=100.0, gone_by=102.0)
