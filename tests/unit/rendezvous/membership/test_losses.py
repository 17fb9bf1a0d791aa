"""Who is lost, and who only seems to be."""

from __future__ import annotations

import pytest

from slurm_elastic.rendezvous.membership import (
    Connected,
    Disconnected,
    Drop,
    Gone,
    Interrupt,
    Interrupted,
    LeaveReason,
    Leaving,
    Left,
    NodesDown,
    Phase,
    Publish,
    Reason,
    Retire,
    SignsOfLife,
    Tick,
    next_deadline,
)
from tests.unit.rendezvous.helpers.scenario import Scenario, only


def test_a_silent_agent_is_lost_after_the_heartbeat_limit() -> None:
    run = Scenario(min_nodes=2, heartbeat_limit=3.0)
    run.join("n0", "n1")
    assert not run.wait(2.9, "n1")
    decisions = run.wait(0.6, "n1")
    assert only(Drop, decisions)[0].why == "silent"
    assert only(Interrupt, decisions) == [Interrupt(("n0",), Interrupted(0, Reason.NODE_LOST, "n1", "silent"))]


def test_a_leader_wakes_up_more_often_while_somebody_is_silent() -> None:
    run = Scenario(min_nodes=2, heartbeat_limit=3.0)
    run.join("n0", "n1")
    run.wait(5.0)
    assert next_deadline(run.state) - run.state.ticked_at == pytest.approx(1.0)
    run.wait(2.5, "n1")
    assert next_deadline(run.state) - run.state.ticked_at == pytest.approx(0.5)


def test_an_agent_that_does_not_connect_again_is_lost_after_the_grace() -> None:
    run = Scenario(min_nodes=2, reconnect_grace=0.1)
    run.join("n0", "n1")
    run.on(Disconnected("n1"))
    assert not run.wait(0.09)
    assert only(Drop, run.wait(0.02))[0].why == "its connection broke"


def test_an_agent_that_connects_again_within_the_grace_is_not() -> None:
    run = Scenario(min_nodes=2, reconnect_grace=0.1)
    run.join("n0", "n1")
    run.on(Disconnected("n1"))
    run.wait(0.05)
    assert run.on(Connected("n1", running=0)) == ()
    assert not run.wait(5.0)


def test_a_reconnection_in_the_leaders_queue_is_seen_before_the_loss() -> None:
    run = Scenario(min_nodes=2, reconnect_grace=0.1)
    run.join("n0", "n1")
    run.on(Disconnected("n1"))
    run.pause(0.3)
    assert run.on(Connected("n0", running=0)) == ()
    assert run.on(Connected("n1", running=0)) == ()
    assert run.on(Tick()) == ()


def test_ticks_come_however_much_is_going_on() -> None:
    run = Scenario(heartbeat_limit=3.0)
    run.join("n0", "n1")
    began = run.now
    while "n1" in run.state.agents:
        run.now += 0.01
        run.on(SignsOfLife((("n0", run.now),)))
        if next_deadline(run.state) <= run.now:
            run.on(Tick())
        assert run.now - began < 4.0


def test_a_pause_of_the_leader_is_nobodys_silence() -> None:
    run = Scenario(heartbeat_limit=3.0)
    run.join("n0")
    run.join("n1")
    run.pause(10.0)
    assert not only(Drop, run.on(Tick()))
    assert not only(Drop, run.wait(1.0))


def test_a_pause_of_the_leader_is_forgiven_to_one_that_was_overdue_before() -> None:
    run = Scenario(heartbeat_limit=3.0)
    run.join("n0")
    run.wait(2.9, "n0")
    run.now += 0.3
    run.on(NodesDown(frozenset()))
    run.pause(10.0)
    assert not only(Drop, run.on(Tick()))
    run.on(SignsOfLife((("n0", run.now),)))
    assert not only(Drop, run.wait(1.0))


def test_a_short_pause_of_a_leader_that_missed_nobody_is_nobodys_silence() -> None:
    run = Scenario(min_nodes=2, heartbeat_limit=1.0)
    run.join("n0", "n1")
    run.pause(0.3)
    run.on(Tick())
    assert run.state.calm
    # An event of another agent, and then a pause that is too short to be noticed as one.
    for seconds in (0.3, 0.45):
        run.pause(seconds)
        run.on(SignsOfLife((("n0", run.now),)))
    assert run.on(Tick()) == ()
    assert not run.wait(0.1, "n1")
    assert only(Drop, run.wait(0.3, "n1")), "but it is missed from now on"


def test_a_pause_of_the_leader_leaves_time_to_connect_again() -> None:
    run = Scenario(min_nodes=2, reconnect_grace=0.1)
    run.join("n0", "n1")
    run.on(Disconnected("n1"))
    run.pause(10.0)
    assert run.on(Tick()) == ()
    assert run.on(Connected("n1", running=0)) == ()
    assert not run.wait(1.0)


def test_a_pause_of_the_leader_puts_no_broken_connection_into_the_future() -> None:
    """0.242 + (13.19 - 0.242) is later than 13.19, as it is rounded."""
    run = Scenario(min_nodes=2, reconnect_grace=30.0)
    run.now = 0.242
    run.join("n0", "n1")
    run.on(Disconnected("n0"))
    run.now = 13.19
    run.on(Disconnected("n1"))
    assert run.state.broken == {"n0", "n1"}
    assert run.state.first_broken_at == 13.19


def test_a_pause_of_the_leader_does_not_use_up_the_last_call() -> None:
    run = Scenario(min_nodes=1, expected_nodes=("n0", "n1"), last_call_timeout=5.0)
    run.join("n0")
    run.pause(10.0)
    assert not only(Publish, run.on(Tick()))
    assert only(Publish, run.join("n1"))


def test_an_agent_found_out_while_stopping_does_not_hold_up_the_round() -> None:
    run = Scenario(heartbeat_limit=3.0)
    run.join("n0")
    run.join("n1")
    run.wait(0.1)
    assert run.state.phase is Phase.FORMING
    # It may still have workers of the only round there was: somebody has to know that it has none.
    assert not only(Publish, run.wait(4.0, "n0"))
    assert only(Publish, run.on(Gone(frozenset({"n0"}))))
    assert run.members == ["n1"]


def test_an_agent_that_missed_the_interruption_is_told_again() -> None:
    run = Scenario()
    run.join("n0")
    run.join("n1")
    run.wait(0.1)
    run.on(Disconnected("n0"))
    assert only(Interrupt, run.on(Connected("n0", running=0)))[0].agents == ("n0",)


def test_two_agents_on_one_node_are_lost_one_by_one() -> None:
    run = Scenario(min_nodes=2, expected_nodes=("n0", "n1"), last_call_timeout=30.0)
    run.join("n0", "n1")
    run.on(Left("n1", LeaveReason.PREEMPTED))
    run.join("n0", last_round=0)
    assert run.state.gone_nodes == {"n1"}
    assert only(Publish, run.join("n1"))
    assert run.state.gone_nodes == frozenset()


def test_a_leaving_agent_that_breaks_off_has_left() -> None:
    run = Scenario(min_nodes=2)
    run.join("n0", "n1")
    run.on(Leaving("n1", LeaveReason.TIME_LIMIT))
    run.on(Disconnected("n1"))
    assert only(Retire, run.wait(0.2)) == [Retire("n1", "n1", LeaveReason.TIME_LIMIT)]
