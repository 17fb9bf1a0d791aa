"""When a round closes, and whom it waits for."""

from __future__ import annotations

import pytest

from slurm_elastic.rendezvous.membership import (
    Connected,
    Disconnected,
    Finish,
    Interrupt,
    Joined,
    LeaveReason,
    Leaving,
    Left,
    NodesDown,
    Outcome,
    Publish,
    Reason,
    Resend,
    Spare,
    Waiting,
)
from tests.unit.rendezvous.helpers.scenario import Scenario, candidate, only


def test_the_first_round_starts_with_the_last_node_of_the_allocation() -> None:
    run = Scenario(min_nodes=1, expected_nodes=("n0", "n1", "n2"))
    assert not only(Publish, run.join("n2", "n0"))
    (published,) = only(Publish, run.join("n1"))
    assert published.table.round == 0
    assert published.table.reason is Reason.START
    assert run.members == ["n0", "n1", "n2"]


def test_a_node_that_never_comes_costs_one_last_call_and_no_second() -> None:
    run = Scenario(min_nodes=2, expected_nodes=("n0", "n1", "n2"), last_call_timeout=30.0)
    run.join("n0", "n1")
    assert not only(Publish, run.wait(29.9))
    assert only(Publish, run.wait(0.2))
    run.on(Left("n1", LeaveReason.PREEMPTED))
    run.wait(1.0)
    assert not only(Publish, run.join("n0", last_round=0)), "n1 went, so the minimum is missing"
    assert only(Publish, run.join("n1", last_round=0))


def test_the_last_call_begins_with_the_minimum() -> None:
    run = Scenario(min_nodes=2, expected_nodes=("n0", "n1", "n2"), last_call_timeout=30.0)
    run.join("n0")
    run.wait(100.0)
    run.join("n1")
    assert not only(Publish, run.wait(29.0))
    assert only(Publish, run.wait(1.1))


def of_srun(name: str, cohort: str, size: int, attempt: int = 1) -> Joined:
    return Joined(candidate(name, cohort=(cohort, size)), attempt)


def test_a_leader_without_an_allocation_waits_for_all_nodes_of_the_jobs_that_come() -> None:
    run = Scenario(min_nodes=1)
    assert not run.on(of_srun("n0", "7.0", 3))
    assert not run.on(of_srun("n1", "8.0", 1))
    assert not run.on(of_srun("n2", "7.0", 3))
    assert not run.on(of_srun("n2", "7.0", 3, attempt=2)), "the same again"
    assert only(Publish, run.on(of_srun("n3", "7.0", 3)))
    assert run.members == ["n0", "n1", "n2", "n3"]


def test_who_came_and_went_or_whose_job_has_gone_is_not_waited_for() -> None:
    run = Scenario(min_nodes=1)
    for name in ("n0", "n1"):
        assert not run.on(of_srun(name, "7.0", 3))
    assert not only(Publish, run.on(Left("n1", LeaveReason.PREEMPTED)))
    assert not run.on(of_srun("n8", "8.0", 2))
    assert not only(Publish, run.on(Left("n8", LeaveReason.PREEMPTED))), "n3 is missing"
    assert only(Publish, run.on(of_srun("n2", "7.0", 3)))
    assert run.members == ["n0", "n2"]


def test_nodes_of_a_job_that_never_come_cost_one_last_call() -> None:
    run = Scenario(min_nodes=1, last_call_timeout=30.0)
    run.on(of_srun("n0", "7.0", 3))
    assert not only(Publish, run.wait(29.9))
    assert only(Publish, run.wait(0.2))
    run.on(of_srun("n1", "7.0", 3))
    assert only(Interrupt, run.wait(0.3))


def test_when_all_have_gone_those_who_come_are_the_first_again() -> None:
    run = Scenario(min_nodes=1)
    run.on(of_srun("n0", "7.0", 1))
    run.on(Left("n0", LeaveReason.PREEMPTED))
    run.wait(1.0)
    assert not run.on(of_srun("n1", "8.0", 2))
    assert only(Publish, run.on(of_srun("n2", "8.0", 2)))


def test_a_node_that_slurm_calls_down_is_not_waited_for() -> None:
    run = Scenario(min_nodes=2, expected_nodes=("n0", "n1", "n2"))
    run.join("n0", "n1")
    assert only(Publish, run.on(NodesDown(frozenset({"n2"}))))


def test_slurm_does_not_overrule_an_agent_that_was_just_heard() -> None:
    run = Scenario(heartbeat_limit=3.0)
    run.join("n0", "n1")
    run.wait(1.0)
    run.on(NodesDown(frozenset({"n1"})))
    assert "n1" in run.state.agents
    run.wait(2.0, "n1")
    run.on(NodesDown(frozenset({"n1"})))
    assert "n1" not in run.state.agents


def test_an_array_starts_with_its_minimum_and_what_is_above_the_maximum_is_spare() -> None:
    run = Scenario(min_nodes=2, max_nodes=2)
    run.join("n5", "n3")
    assert run.members == ["n3", "n5"]
    assert only(Spare, run.join("n1")) == [Spare(("n1",), Waiting(), node="n1")]
    assert not run.wait(5.0)
    run.on(Left("n3", LeaveReason.PREEMPTED))
    (published,) = only(Publish, run.join("n5", last_round=0))
    assert [place.agent for place in published.table.places] == ["n1", "n5"]


def test_a_spare_displaces_no_member() -> None:
    run = Scenario(min_nodes=2, max_nodes=2)
    run.join("n2", "n3")
    assert run.members == ["n2", "n3"]
    run.join("n0", "n1")
    run.on(Left("n3", LeaveReason.PREEMPTED))
    (published,) = only(Publish, run.join("n2", last_round=0))
    assert [place.agent for place in published.table.places] == ["n0", "n2"]


def test_a_round_waits_until_the_workers_of_the_last_one_are_gone() -> None:
    run = Scenario()
    run.join("n0")
    run.join("n1")
    assert only(Interrupt, run.wait(0.1))[0].agents == ("n0",)
    assert not only(Publish, run.wait(20.0))
    assert only(Publish, run.join("n0", last_round=0))


def test_a_round_does_not_close_over_a_broken_connection() -> None:
    run = Scenario(min_nodes=2, reconnect_grace=0.1)
    run.join("n0")
    run.on(Disconnected("n0"))
    assert not only(Publish, run.join("n1"))
    assert not only(Publish, run.on(Connected("n1", None)))
    assert only(Publish, run.on(Connected("n0", None)))


def test_new_nodes_are_gathered_into_one_further_round() -> None:
    run = Scenario(gather_quiet=0.05, gather_limit=1.0)
    run.join("n0")
    for number in range(1, 8):
        run.join(f"n{number}")
        assert not run.wait(0.04)
    (interrupt,) = only(Interrupt, run.wait(0.05))
    assert interrupt.message.reason is Reason.NODE_JOINED
    assert interrupt.message.node == "n1, n2, n3, n4, n5, n6, n7"
    run.join("n0", last_round=0)
    assert len(run.members) == 8


def test_gathering_has_an_end() -> None:
    run = Scenario(max_nodes=100, gather_quiet=0.05, gather_limit=1.0)
    run.join("n0")
    began = run.now
    for number in range(1, 100):
        run.join(f"n{number}")
        if only(Interrupt, run.wait(0.04)):
            break
    assert run.now - began == pytest.approx(1.0, abs=0.05)


def test_a_newcomer_that_went_again_interrupts_nobody() -> None:
    run = Scenario()
    run.join("n0", "n1")
    run.on(Left("n1", LeaveReason.PREEMPTED))
    assert not run.wait(5.0)
    assert run.members == ["n0"]


def test_a_run_that_never_reaches_its_minimum_is_given_up() -> None:
    run = Scenario(min_nodes=3, join_timeout=600.0)
    run.join("n0", "n1")
    assert not run.wait(599.9)
    (finish,) = only(Finish, run.wait(0.2))
    assert finish.message.outcome is Outcome.TIMED_OUT
    assert set(finish.agents) == {"n0", "n1"}
    assert "2 of at least 3" in finish.message.detail


def test_a_place_that_was_lost_on_the_way_is_given_again() -> None:
    run = Scenario()
    run.join("n0")
    (resend,) = only(Resend, run.join("n0"))
    assert resend.table == run.state.table
    assert run.state.agents["n0"].attempt == 2


def test_an_old_join_changes_nothing() -> None:
    run = Scenario()
    run.join("n0")
    before = run.state
    assert run.on(Joined(candidate("n0"), 1)) == ()
    assert run.state.agents["n0"].attempt == before.agents["n0"].attempt


def test_an_old_join_does_not_bring_back_who_has_gone() -> None:
    run = Scenario(min_nodes=2)
    run.join("n0")
    run.on(Leaving("n0", LeaveReason.PREEMPTED))
    assert not run.state.agents
    run.on(Joined(candidate("n0"), 1))
    assert not run.state.agents
    run.on(Joined(candidate("n0"), 2))
    assert set(run.state.agents) == {"n0"}


def test_an_agent_that_was_given_up_and_comes_back_is_stopped_and_joins_as_a_new_one() -> None:
    run = Scenario(heartbeat_limit=3.0)
    run.join("n0")
    run.join("n1")
    run.wait(0.1)
    run.join("n0", last_round=0)
    run.wait(4.0, "n1")
    run.join("n0", last_round=1)
    assert run.members == ["n0"]
    (interrupt,) = only(Interrupt, run.on(Connected("n1", running=1)))
    assert (interrupt.agents, interrupt.message.round) == (("n1",), 1)
    run.join("n1", last_round=1)
    assert only(Interrupt, run.wait(0.1))[0].agents == ("n0",)
