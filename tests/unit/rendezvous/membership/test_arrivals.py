"""Agents that come together cost the running round one end, however long each takes to join."""

from __future__ import annotations

import pytest

from slurm_elastic.rendezvous.membership import (
    Base,
    Claimed,
    Connected,
    Disconnected,
    Interrupt,
    LeaveReason,
    Leaving,
    Left,
    Publish,
    Reason,
)
from tests.unit.rendezvous.helpers.scenario import Scenario, only

PAIR = ("7.0.1", 2)


def comes(name: str) -> Connected:
    return Connected(name, None, coming=True)


def running(**settings: object) -> Scenario:
    run = Scenario(**{"last_call_timeout": 30.0, **settings})
    run.join("n0")
    assert run.members == ["n0"]
    return run


def test_a_new_agent_waits_for_one_that_gets_ready() -> None:
    run = running()
    run.on(comes("n2"))
    assert not run.join("n1")
    assert not run.wait(10.0)
    assert not run.join("n2")
    (interrupt,) = only(Interrupt, run.wait(0.1))
    assert (interrupt.message.reason, interrupt.message.node) == (Reason.NODE_JOINED, "n1, n2")


def test_an_agent_that_gets_ready_is_not_waited_for_by_itself() -> None:
    run = running()
    run.on(comes("n1"))
    assert not run.wait(60.0)
    run.join("n1")
    assert only(Interrupt, run.wait(0.1))


@pytest.mark.parametrize(
    "end",
    [
        Disconnected("n2"),
        Left("n2", LeaveReason.PREEMPTED),
        Leaving("n2", LeaveReason.PREEMPTED, 30.0),
        Connected("n2", None),
    ],
    ids=lambda event: type(event).__name__,
)
def test_one_that_will_not_come_after_all_ends_the_waiting(end: object) -> None:
    run = running()
    run.on(comes("n2"))
    run.join("n1")
    run.wait(5.0)
    run.on(end)  # type: ignore[arg-type]
    (interrupt,) = only(Interrupt, run.wait(0.1))
    assert interrupt.message.node == "n1"


def test_one_that_hangs_while_it_gets_ready_is_waited_for_no_longer_than_a_last_call() -> None:
    run = running()
    run.on(comes("n2"))
    run.join("n1")
    assert not run.wait(29.9)
    assert only(Interrupt, run.wait(0.2))


def test_a_greeting_that_comes_late_awaits_nobody_who_is_there_or_has_gone() -> None:
    run = running()
    run.join("n1")
    run.on(comes("n1"))
    assert only(Interrupt, run.wait(0.1))
    run.join("n0", last_round=0)
    run.on(Left("n1", LeaveReason.PREEMPTED))
    run.join("n0", last_round=1)
    run.on(comes("n1"))
    run.join("n2")
    assert only(Interrupt, run.wait(0.1))


def test_the_agents_of_one_srun_cost_one_further_round() -> None:
    run = running()
    run.join("n1", cohort=PAIR)
    assert not run.wait(10.0)
    run.join("n2", cohort=PAIR)
    (interrupt,) = only(Interrupt, run.wait(0.1))
    assert interrupt.message.node == "n1, n2"


def test_one_of_a_cohort_that_never_comes_costs_one_last_call_and_no_second() -> None:
    run = running()
    run.join("n1", cohort=("7.0.1", 3))
    assert not run.wait(29.9)
    assert only(Interrupt, run.wait(0.2))
    run.join("n0", last_round=0)
    assert run.members == ["n0", "n1"]
    run.join("n2", cohort=("7.0.1", 3))
    assert only(Interrupt, run.wait(0.1))


def test_nodes_that_missed_the_last_call_of_an_allocation_are_not_waited_for_again() -> None:
    run = Scenario(expected_nodes=("n0", "n1", "n2"), last_call_timeout=30.0)
    run.join("n0", cohort=("7.0.0", 3))
    assert only(Publish, run.wait(30.1))
    run.join("n2", cohort=("7.0.0", 3))
    assert only(Interrupt, run.wait(0.1))


def test_one_of_a_cohort_that_has_gone_again_is_not_waited_for() -> None:
    run = running()
    run.join("n1", "n2", cohort=("7.0.1", 3))
    run.on(Left("n2", LeaveReason.FAILED))
    assert not run.wait(5.0)
    run.join("n3", cohort=("7.0.1", 3))
    (interrupt,) = only(Interrupt, run.wait(0.1))
    assert interrupt.message.node == "n1, n3"


def test_those_who_joined_a_living_run_are_not_waited_for_when_it_begins_anew() -> None:
    run = running()
    run.join("n1", cohort=PAIR)
    run.join("n2", cohort=PAIR)
    assert only(Publish, run.on(Left("n0", LeaveReason.PREEMPTED)))
    assert run.members == ["n1", "n2"]


def test_nobody_is_waited_for_whom_the_round_has_no_room_for() -> None:
    run = running(max_nodes=2)
    run.on(comes("n2"))
    run.join("n1", cohort=("7.0.1", 3))
    assert only(Interrupt, run.wait(0.1))


def test_nobody_is_waited_for_when_the_round_ends_for_another_reason() -> None:
    run = Scenario(min_nodes=2)
    run.join("n0", "n9")
    run.on(comes("n2"))
    run.join("n1", cohort=PAIR)
    assert not run.wait(1.0)
    run.on(Left("n0", LeaveReason.PREEMPTED))
    assert only(Publish, run.join("n9", last_round=0))
    assert run.members == ["n1", "n9"]


def test_a_run_below_its_minimum_waits_for_nobody_who_is_above_it() -> None:
    run = Scenario(min_nodes=2)
    run.on(comes("n2"))
    run.join("n0")
    assert only(Publish, run.join("n1"))


def test_a_leader_that_follows_does_not_wait_for_those_that_went_before_its_time() -> None:
    base = Base(4, ("n0", "n1", "n2"), ("n0", "n1", "n2"), leader="n0")
    run = Scenario(agent="n1", base=base, claimed=False, first_round=5, gone=frozenset({"n0"}))
    run.join("n1", "n2", last_round=4, cohort=("7.0.0", 4))
    run.on(Claimed())
    assert run.members == ["n1", "n2"]
    run.join("n3", cohort=("7.0.0", 4))
    assert only(Interrupt, run.wait(0.1))
