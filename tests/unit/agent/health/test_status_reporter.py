from __future__ import annotations

import select

import pytest

from slurm_elastic.agent.features import HealthFeature
from slurm_elastic.agent.health import state as module
from slurm_elastic.agent.health.state import AgentState, Reporter
from slurm_elastic.agent.lifecycle.actions import AnnounceLeave
from slurm_elastic.rendezvous.membership.agents import LeaveReason


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def asked(reporter: Reporter) -> bool:
    return bool(select.select([reporter.fd], [], [], 0)[0])


def test_the_main_loop_is_asked_only_when_its_last_sign_is_old(clock: Clock) -> None:
    reporter = Reporter(AgentState("7", "n1", "7", "n1/7.0/1", 0.0))
    clock.now += 0.5
    assert reporter.silence() == 0.0
    assert not asked(reporter)
    clock.now += 3600.0
    assert not asked(reporter)
    assert reporter.silence() == 0.0
    assert asked(reporter)
    clock.now += 70.0
    assert reporter.silence() == 70.0
    reporter.answer()
    assert reporter.silence() == 0.0
    assert not asked(reporter)
    reporter.close()


def test_a_main_loop_that_has_ended_owes_nothing(clock: Clock) -> None:
    reporter = Reporter(AgentState("7", "n1", "7", "n1/7.0/1", 0.0))
    clock.now += 10.0
    reporter.silence()
    # Before what may take minutes at the end, such as the last checkpoint.
    HealthFeature(reporter).run_ended()
    clock.now += 100.0
    assert reporter.silence() == 0.0
    reporter.close()


def test_a_leave_of_which_more_becomes_known_is_one_notice() -> None:
    reporter = Reporter(AgentState("7", "n1", "7", "n1/7.0/1", 0.0))
    feature = HealthFeature(reporter)
    for seconds, detail in ((30.0, ""), (25.0, "by job 8")):
        feature.leave_announced(AnnounceLeave(LeaveReason.PREEMPTED, seconds, detail))
    assert reporter.state.notices == ("preempted",)
    assert reporter.state.leave is not None
    assert reporter.state.leave.detail == "by job 8"
    reporter.close()
