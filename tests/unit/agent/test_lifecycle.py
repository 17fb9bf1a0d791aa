"""When an agent that leaves stops its workers. The rest of its life cycle is text: tests/unit/testdata/lifecycle."""

from __future__ import annotations

import pytest

from slurm_elastic.agent.lifecycle.states import Departure, LifecycleConfig, depart
from slurm_elastic.rendezvous.membership.agents import LeaveReason

NOW = 100.0
PREEMPTED = LeaveReason.PREEMPTED
DEPARTURE = Departure(PREEMPTED, "SIGTERM", stop_by=125.0, gone_by=130.0)


def plan(seconds: float | None) -> Departure:
    config = LifecycleConfig("n1/7.0/1", "n1", "7", "n0", shutdown_timeout=30.0, leave_margin=5.0)
    return depart(config, PREEMPTED, "SIGTERM", seconds, NOW)


def test_without_a_deadline_workers_have_their_usual_time_in_all() -> None:
    assert plan(None) == DEPARTURE


def test_workers_are_killed_before_the_deadline() -> None:
    assert plan(60.0) == Departure(PREEMPTED, "SIGTERM", stop_by=155.0, gone_by=158.75)


@pytest.mark.parametrize("seconds", [0.1, 1.0, 4.0, 9.0])
def test_a_short_time_is_shared(seconds: float) -> None:
    departure = plan(seconds)
    assert departure.stop_by == NOW + seconds / 2
    assert departure.stop_by < departure.gone_by < NOW + seconds


def test_a_deadline_that_is_past_leaves_a_moment() -> None:
    assert plan(-3.0) == Departure(PREEMPTED, "SIGTERM", stop_by=100.0, gone_by=102.0)
