"""Agents that leave, finish and go, and how a run ends."""

from __future__ import annotations

from slurm_elastic.rendezvous.membership import (
    Closed,
    Connected,
    Disconnected,
    Drop,
    Finish,
    Finished,
    Interrupt,
    LeaveReason,
    Leaving,
    Left,
    Outcome,
    Phase,
    Ponged,
    Publish,
    Reason,
    Retire,
    Status,
)
from tests.unit.rendezvous.helpers.scenario import Scenario, failed, only


def three(**settings: object) -> Scenario:
    run = Scenario(min_nodes=3, **settings)
    run.join("n0", "n1", "n2")
    return run


def test_a_leave_interrupts_everybody_and_the_round_waits_for_the_farewell() -> None:
    run = three()
    agents = ("n0", "n1", "n2")
    (interrupt,) = only(Interrupt, run.on(Leaving("n1", LeaveReason.PREEMPTED)))
    assert (interrupt.agents, interrupt.message.reason, interrupt.message.detail) == (
        agents,
        Reason.NODE_LEFT,
        "preempted",
    )
    run.join("n3")
    run.join("n0", "n2", last_round=0)
    assert run.state.phase is Phase.FORMING, "n1 may still have workers"
    decisions = run.on(Left("n1", LeaveReason.PREEMPTED))
    assert only(Retire, decisions)
    assert only(Publish, decisions)[0].table.reason is Reason.NODE_LEFT


def test_a_waiting_agent_that_leaves_is_gone_at_once() -> None:
    run = Scenario(min_nodes=2)
    run.join("n0")
    assert only(Retire, run.on(Leaving("n0", LeaveReason.DRAINED)))
    run.join("n1")
    assert run.state.phase is Phase.FORMING


def test_the_run_succeeds_when_every_member_has_finished() -> None:
    run = three(max_nodes=3)
    run.join("n3")
    run.on(Finished("n0", 0))
    run.on(Finished("n1", 0))
    (finish,) = only(Finish, run.on(Finished("n2", 0)))
    assert finish.message.outcome is Outcome.SUCCEEDED
    assert set(finish.agents) == {"n0", "n1", "n2", "n3"}, "the spare is told too"


def test_the_word_of_an_older_round_finishes_nothing() -> None:
    run = Scenario()
    run.join("n0")
    run.join("n1")
    run.wait(0.1)
    run.join("n0", last_round=0)
    run.on(Finished("n0", 0))
    assert run.state.agents["n0"].status is Status.RUNNING


def test_a_member_that_finished_may_go_without_breaking_the_slow_ones() -> None:
    run = three()
    run.on(Finished("n0", 0))
    run.on(Left("n0", LeaveReason.FINISHED))
    assert run.on(Disconnected("n0")) == ()
    assert not run.wait(60.0, "n0")
    run.on(Finished("n1", 0))
    assert only(Finish, run.on(Finished("n2", 0)))[0].message.outcome is Outcome.SUCCEEDED


def test_a_member_that_finished_may_be_preempted_or_lost_without_breaking_the_slow_ones() -> None:
    run = three()
    run.on(Finished("n0", 0))
    run.on(Finished("n1", 0))
    assert run.on(Leaving("n0", LeaveReason.PREEMPTED)) == ()
    assert only(Retire, run.on(Left("n0", LeaveReason.PREEMPTED)))
    decisions = run.wait(4.0, "n1")
    assert only(Drop, decisions)[0].agent == "n1"
    assert not only(Interrupt, decisions)
    assert only(Finish, run.on(Finished("n2", 0)))[0].message.outcome is Outcome.SUCCEEDED


def test_a_farewell_says_that_the_workers_finished() -> None:
    run = Scenario()
    run.join("n0")
    assert only(Finish, run.on(Left("n0", LeaveReason.FINISHED)))[0].message.outcome is Outcome.SUCCEEDED


def test_a_finished_member_that_is_leaving_is_not_asked_back() -> None:
    run = three(max_restarts=1)
    run.on(Finished("n0", 0))
    run.on(Leaving("n0", LeaveReason.PREEMPTED))
    run.on(failed("n1"))
    for name in ("n0", "n1", "n2"):
        run.on(Ponged(name, 1))
    assert only(Interrupt, run.wait(0.2))[0].agents == ("n1", "n2")


def test_the_node_of_a_member_that_finished_and_went_is_not_waited_for() -> None:
    run = Scenario(expected_nodes=("n0", "n1", "n2"), max_restarts=1)
    run.join("n0", "n1", "n2")
    run.on(Finished("n0", 0))
    run.on(Left("n0", LeaveReason.FINISHED))
    run.on(failed("n1"))
    run.on(Ponged("n1", 1))
    run.on(Ponged("n2", 1))
    run.wait(0.2)
    assert only(Publish, run.join("n1", "n2", last_round=0)), "no last call for n0"


def test_new_nodes_do_not_disturb_a_run_that_comes_to_its_end() -> None:
    run = three()
    run.on(Finished("n0", 0))
    run.join("n3")
    assert not run.wait(10.0)


def test_a_finished_member_is_interrupted_with_the_others() -> None:
    run = three()
    run.on(Finished("n0", 0))
    run.on(Disconnected("n2"))
    assert only(Interrupt, run.wait(0.2))[0].agents == ("n0", "n1")
    assert run.state.blocking == 2


def test_whoever_comes_after_the_end_is_told_how_it_ended() -> None:
    run = Scenario()
    run.join("n0")
    run.on(Closed("n0"))
    assert only(Finish, run.join("n5"))[0].agents == ("n5",)
    (finish,) = only(Finish, run.on(Connected("n0", running=0)))
    assert (finish.agents, finish.message.outcome) == (("n0",), Outcome.CLOSED)


def test_a_run_ends_once() -> None:
    run = Scenario()
    run.join("n0")
    assert only(Finish, run.on(Closed("n0")))
    assert run.on(Closed("n0")) == ()
    assert not run.wait(60.0, "n0"), "nobody is lost any more"
