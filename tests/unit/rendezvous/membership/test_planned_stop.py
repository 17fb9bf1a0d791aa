"""Rounds that end as planned: everybody stops at one step."""

from __future__ import annotations

import pytest

from slurm_elastic.rendezvous.membership import (
    Connected,
    Decision,
    Disconnected,
    Drop,
    Finish,
    Finished,
    Held,
    Holding,
    Interrupt,
    Interrupted,
    LeaveReason,
    Leaving,
    Left,
    Outcome,
    Phase,
    Ponged,
    Probed,
    Publish,
    Reason,
    Retire,
    Send,
    Stopping,
    seconds_to_stop,
)
from tests.unit.rendezvous.helpers.scenario import Scenario, failed, only, sent

ALL = ("n0", "n1", "n2")


@pytest.fixture
def run() -> Scenario:
    """Three members whose workers take part; n2 can be spared."""
    run = Scenario(answers=True, min_nodes=3, max_restarts=1, heartbeat_limit=3.0, leave_margin=5.0)
    run.join(*ALL)
    return run


def leave(run: Scenario, name: str = "n2", seconds: float | None = 30.0) -> tuple[Decision, ...]:
    return run.on(Leaving(name, LeaveReason.PREEMPTED, seconds))


def agree(run: Scenario, *steps: int) -> Send:
    """All members answer with these steps."""
    decisions: tuple[Decision, ...] = ()
    for name, step in zip(ALL, steps, strict=True):
        assert not decisions, "not all have answered"
        decisions = run.on(Held(name, 0, step))
    (stop_at,) = sent(Stopping, decisions)
    return stop_at


def test_a_leave_asks_everybody_and_interrupts_nobody(run: Scenario) -> None:
    assert leave(run) == (Send(ALL, Holding(0, ("n2",))),)
    assert run.state.phase is Phase.RUNNING


def test_all_stop_at_the_latest_of_the_answers(run: Scenario) -> None:
    leave(run)
    assert agree(run, 17, 18, 17) == Send(ALL, Stopping(0, 18, Reason.NODE_LEFT, "n2", "preempted", 25.0, ("n2",)))


def test_the_next_round_begins_with_the_last_word_of_this_one(run: Scenario) -> None:
    leave(run)
    agree(run, 17, 17, 17)
    run.join("n3")
    assert run.join("n0", last_round=0) == ()
    (retire,) = run.on(Left("n2", LeaveReason.PREEMPTED, stopped=True))
    assert retire == Retire("n2", "n2", LeaveReason.PREEMPTED)
    interrupt, publish = run.join("n1", last_round=0)
    assert interrupt == Interrupt(("n2",), Interrupted(0, Reason.NODE_LEFT, "n2", "preempted"), step=17), (
        "n2 may serve the store"
    )
    assert isinstance(publish, Publish)
    assert run.members == ["n0", "n1", "n3"]
    assert publish.table.reason is Reason.NODE_LEFT
    assert publish.table.restarts == 0


def test_new_nodes_come_in_by_the_same_door_and_take_their_time() -> None:
    run = Scenario(answers=True, gather_quiet=0.05)
    run.join("n0")
    run.join("n1")
    assert run.wait(0.06) == (Send(("n0",), Holding(0)),)
    run.join("n2")
    assert run.on(Held("n0", 0, 3)) == (Send(("n0",), Stopping(0, 3, Reason.NODE_JOINED, "n1", "", None)),)
    assert not run.wait(600.0), "nobody has to go"
    interrupt, publish = run.join("n0", last_round=0)
    assert interrupt == Interrupt((), Interrupted(0, Reason.NODE_JOINED, "n1, n2", ""), step=3)
    assert isinstance(publish, Publish)
    assert run.members == ["n0", "n1", "n2"]


def test_a_round_is_not_ended_for_new_nodes_before_it_has_lasted_a_while() -> None:
    run = Scenario(answers=True, min_round_time=10.0)
    run.join("n0")
    run.join("n1")
    assert not run.wait(9.9)
    assert sent(Holding, run.wait(0.2))


def test_a_leave_does_not_wait_for_a_round_to_last() -> None:
    run = Scenario(answers=True, min_round_time=10.0)
    run.join("n0")
    assert sent(Holding, run.on(Leaving("n0", LeaveReason.DRAINED)))


def test_one_member_that_takes_no_part_makes_it_an_interruption(run: Scenario) -> None:
    leave(run)
    run.on(Held("n0", 0, 17))
    (interrupt,) = run.on(Held("n1", 0, None))
    assert interrupt == Interrupt(ALL, Interrupted(0, Reason.NODE_LEFT, "n2", "preempted")), "the one that leaves, too"
    assert run.state.phase is Phase.FORMING


def test_a_member_may_say_later_that_it_does_not_stop_there(run: Scenario) -> None:
    leave(run)
    agree(run, 17, 17, 17)
    run.join("n0", last_round=0)
    (interrupt,) = run.on(Held("n2", 0, None))
    assert isinstance(interrupt, Interrupt)
    assert interrupt.agents == ("n1", "n2"), "n0 has stopped already"
    assert interrupt.step is None


def test_whoever_does_not_answer_holds_up_the_others_for_a_short_while_only(run: Scenario) -> None:
    leave(run, seconds=None)
    run.on(Held("n0", 0, 17))
    assert not run.wait(2.9)
    assert only(Interrupt, run.wait(0.4))[0].agents == ALL


def test_whoever_has_not_stopped_a_margin_before_the_deadline_is_interrupted(run: Scenario) -> None:
    leave(run, seconds=30.0)
    agree(run, 17, 17, 17)
    run.join("n0", last_round=0)
    assert not run.wait(24.9)
    (interrupt,) = run.wait(0.2)
    assert interrupt == Interrupt(("n1", "n2"), Interrupted(0, Reason.NODE_LEFT, "n2", "preempted"))


@pytest.mark.parametrize(
    ("seconds", "left"), [(30.0, 25.0), (6.0, 3.0), (10.0, 5.0), (11.0, 6.0), (0.0, 0.0), (-3.0, 0.0)]
)
def test_the_margin_takes_at_most_half_of_a_short_time(seconds: float, left: float) -> None:
    assert seconds_to_stop(seconds, margin=5.0) == left


def test_a_deadline_that_is_past_interrupts_at_once(run: Scenario) -> None:
    leave(run, seconds=-1.0)
    assert only(Interrupt, run.wait(0.0))


def test_a_pause_of_the_leader_does_not_put_off_the_deadline(run: Scenario) -> None:
    leave(run, seconds=30.0)
    agree(run, 17, 17, 17)
    run.pause(25.0)
    assert only(Interrupt, run.wait(0.0))


def test_a_pause_of_the_leader_leaves_time_to_answer(run: Scenario) -> None:
    leave(run, seconds=None)
    run.pause(10.0)
    assert not run.wait(0.0)
    agree(run, 17, 17, 17)


def test_a_second_leave_is_part_of_the_same_change(run: Scenario) -> None:
    leave(run, "n2", seconds=30.0)
    assert leave(run, "n1", seconds=20.0) == ()
    assert agree(run, 17, 17, 17) == Send(
        ALL, Stopping(0, 17, Reason.NODE_LEFT, "n2, n1", "preempted", 15.0, ("n1", "n2"))
    )
    assert run.on(Left("n1", LeaveReason.PREEMPTED, stopped=True)) != ()
    run.on(Left("n2", LeaveReason.PREEMPTED, stopped=True))
    run.join("n0", last_round=0)
    assert run.state.phase is Phase.FORMING, "one node is too few"
    assert set(run.state.agents) == {"n0"}


def test_a_second_leave_with_less_time_is_told_to_those_that_know_the_step(run: Scenario) -> None:
    leave(run, "n2", seconds=30.0)
    agree(run, 17, 17, 17)
    assert leave(run, "n1", seconds=29.9) == (), "as good as the same"
    assert sent(Stopping, leave(run, "n0", seconds=15.0))[0].message.seconds == 10.0


def test_a_leave_outweighs_growth() -> None:
    run = Scenario(answers=True)
    run.join("n0")
    run.join("n1")
    run.wait(0.1)
    run.on(Held("n0", 0, 3))
    (stop_at,) = leave(run, "n0", seconds=20.0)
    assert stop_at == Send(("n0",), Stopping(0, 3, Reason.NODE_LEFT, "n0", "preempted", 15.0, ("n0",)))
    run.on(Left("n0", LeaveReason.PREEMPTED, stopped=True))
    assert run.members == ["n1"]


def test_all_may_leave_at_once(run: Scenario) -> None:
    for name in ALL:
        leave(run, name)
    agree(run, 17, 17, 16)
    for name in ALL:
        decisions = run.on(Left(name, LeaveReason.PREEMPTED, stopped=True))
    assert only(Interrupt, decisions)[0].agents == ALL
    assert not only(Finish, decisions)
    assert run.state.phase is Phase.FORMING


def test_a_member_that_was_away_is_asked_again(run: Scenario) -> None:
    leave(run)
    run.on(Disconnected("n1"))
    assert run.on(Connected("n1", running=0)) == (Send(("n1",), Holding(0, ("n2",))),)
    agree(run, 17, 17, 17)
    run.on(Disconnected("n1"))
    (stop_at,) = run.on(Connected("n1", running=0))
    assert isinstance(stop_at, Send)
    assert isinstance(stop_at.message, Stopping)
    assert (stop_at.agents, stop_at.message.step) == (("n1",), 17)
    run.join("n1", last_round=0)
    assert run.on(Connected("n1", running=None)) == ()


def test_a_member_whose_place_was_lost_on_the_way_is_asked_when_it_has_it(run: Scenario) -> None:
    leave(run)
    _, hold = run.join("n1")
    assert hold == Send(("n1",), Holding(0, ("n2",)))


def test_a_member_that_is_lost_before_it_has_stopped_interrupts_the_others(run: Scenario) -> None:
    leave(run)
    agree(run, 17, 17, 17)
    run.join("n0", last_round=0)
    run.on(Disconnected("n1"))
    drop, interrupt = run.wait(0.2)
    assert isinstance(drop, Drop)
    assert isinstance(interrupt, Interrupt)
    assert (interrupt.agents, interrupt.message.reason) == (("n2",), Reason.NODE_LOST)


def test_a_member_that_is_lost_after_it_has_stopped_is_not_missed(run: Scenario) -> None:
    leave(run)
    agree(run, 17, 17, 17)
    run.join("n0", last_round=0)
    run.on(Disconnected("n0"))
    (drop,) = run.wait(0.2)
    assert isinstance(drop, Drop)
    run.join("n1", last_round=0)
    interrupt, *_ = run.on(Left("n2", LeaveReason.PREEMPTED, stopped=True))
    assert interrupt != ()
    assert run.state.phase is Phase.FORMING


def test_a_member_that_leaves_without_having_stopped_interrupts_the_others(run: Scenario) -> None:
    leave(run)
    agree(run, 17, 17, 17)
    retire, interrupt = run.on(Left("n2", LeaveReason.PREEMPTED))
    assert isinstance(retire, Retire)
    assert isinstance(interrupt, Interrupt)
    assert interrupt.agents == ("n0", "n1")


def test_a_worker_that_fails_while_it_stops_is_charged(run: Scenario) -> None:
    leave(run)
    agree(run, 17, 17, 17)
    run.join("n0", last_round=0)
    assert sent(Probed, run.on(failed("n1")))
    run.on(Left("n2", LeaveReason.PREEMPTED, stopped=True))
    for name in ("n0", "n1"):
        run.on(Ponged(name, 1))
    (interrupt,) = run.wait(0.2)
    assert isinstance(interrupt, Interrupt)
    assert interrupt.message.reason is Reason.WORKER_FAILED
    assert run.state.restarts == 1


@pytest.mark.parametrize("explains", [Left("n2", LeaveReason.PREEMPTED), Held("n2", 0, None)])
def test_a_failure_that_a_forced_stop_explains_is_not_charged(run: Scenario, explains: Left | Held) -> None:
    leave(run)
    agree(run, 17, 17, 17)
    run.on(failed("n1"))
    for name in ALL:
        run.on(Ponged(name, 1))
    assert only(Interrupt, run.on(explains))[0].message.reason is Reason.NODE_LEFT
    assert run.state.restarts == 0


def test_growth_explains_no_failure() -> None:
    run = Scenario(answers=True, max_restarts=1)
    run.join("n0")
    run.join("n1")
    run.wait(0.1)
    run.on(failed("n0"))
    assert run.on(Held("n0", 0, None)) == ()
    run.on(Ponged("n0", 1))
    assert only(Interrupt, run.wait(0.2))[0].message.reason is Reason.WORKER_FAILED


def test_a_verdict_comes_before_the_end_of_the_round(run: Scenario) -> None:
    leave(run)
    agree(run, 17, 17, 17)
    run.on(failed("n0"))
    run.join("n0", last_round=0)
    run.join("n1", last_round=0)
    assert run.on(Left("n2", LeaveReason.PREEMPTED, stopped=True)) == (Retire("n2", "n2", LeaveReason.PREEMPTED),)
    for name in ("n0", "n1"):
        run.on(Ponged(name, 1))
    assert only(Interrupt, run.wait(0.2))[0].message.reason is Reason.WORKER_FAILED


def test_a_round_may_come_to_its_own_end_before_the_step(run: Scenario) -> None:
    leave(run)
    agree(run, 17, 17, 17)
    for name in ALL:
        decisions = run.on(Finished(name, 0))
    assert only(Finish, decisions)[0].message.outcome is Outcome.SUCCEEDED


def test_a_finished_member_owes_no_answer(run: Scenario) -> None:
    run.on(Finished("n0", 0))
    assert leave(run) == (Send(("n1", "n2"), Holding(0, ("n2",))),)
    run.on(Held("n1", 0, 17))
    assert sent(Stopping, run.on(Held("n2", 0, 17)))[0].agents == ("n1", "n2")
    run.join("n1", last_round=0)
    interrupt = only(Interrupt, run.on(Left("n2", LeaveReason.PREEMPTED, stopped=True)))[0]
    assert interrupt.agents == ("n2", "n0"), "not all have finished"


def test_whoever_joins_again_before_there_is_a_step_has_stopped_its_workers(run: Scenario) -> None:
    leave(run)
    (interrupt,) = run.join("n0", last_round=0)
    assert isinstance(interrupt, Interrupt)
    assert interrupt.agents == ("n1", "n2")
    assert run.state.restarts == 0


def test_old_answers_change_nothing(run: Scenario) -> None:
    assert run.on(Held("n0", 0, 17)) == (), "nobody was asked"
    leave(run)
    assert run.on(Held("n0", 5, None)) == (), "another round"
    assert run.on(Held("n9", 0, None)) == (), "a stranger"
    agree(run, 17, 17, 17)
    assert run.on(Held("n0", 0, 19)) == (), "a step was agreed on"
    run.join("n0", last_round=0)
    assert run.on(Held("n0", 0, None)) == (), "it has stopped"


def test_new_nodes_wait_for_the_end_that_is_planned_already(run: Scenario) -> None:
    leave(run)
    agree(run, 17, 17, 17)
    run.join("n3")
    assert not run.wait(2.0)
    run.join("n0", "n1", last_round=0)
    run.on(Left("n2", LeaveReason.PREEMPTED, stopped=True))
    assert run.members == ["n0", "n1", "n3"]


def test_who_leaves_may_find_out_that_there_is_more_time(run: Scenario) -> None:
    # Slurm tells how long a grace is only when it is asked.
    leave(run, seconds=30.0)
    agree(run, 7, 9, 8)
    (told,) = sent(Stopping, leave(run, seconds=300.0))
    assert (told.agents, told.message.step, told.message.seconds) == (ALL, 9, 295.0)
    assert not only(Interrupt, run.wait(200.0))
    assert only(Interrupt, run.wait(100.0))


def test_or_that_there_is_less(run: Scenario) -> None:
    leave(run, seconds=None)
    agree(run, 7, 9, 8)
    (told,) = sent(Stopping, leave(run, seconds=15.0))
    assert told.message.seconds == 10.0
    assert only(Interrupt, run.wait(10.5))


def test_the_one_with_the_least_time_counts_and_its_newest_word(run: Scenario) -> None:
    leave(run, "n1", seconds=30.0)
    leave(run, "n2", seconds=30.0)
    agree(run, 7, 9, 8)
    # The same again is no news.
    assert leave(run, "n2", seconds=30.0) == ()
    assert leave(run, "n2", seconds=300.0) == ()
    assert [stop.message.seconds for stop in sent(Stopping, leave(run, "n1", seconds=200.0))] == [195.0]


def test_the_round_ends_for_the_reason_that_was_found_last(run: Scenario) -> None:
    leave(run, seconds=None)
    run.on(Leaving("n2", LeaveReason.TIME_LIMIT, 60.0))
    assert agree(run, 7, 9, 8).message.detail == "time_limit"


def test_a_cause_that_is_not_known_yet_is_left_out_beside_one_that_is(run: Scenario) -> None:
    run.on(Leaving("n2", LeaveReason.NODE_LEFT, 30.0))
    run.on(Leaving("n0", LeaveReason.CANCELLED, 30.0))
    run.on(Leaving("n1", LeaveReason.NODE_LEFT, 30.0))
    assert agree(run, 7, 9, 8).message.detail == "cancelled"


def test_so_is_one_that_is_known_later(run: Scenario) -> None:
    run.on(Leaving("n2", LeaveReason.NODE_LEFT, 30.0))
    run.on(Leaving("n1", LeaveReason.NODE_LEFT, 30.0))
    run.on(Leaving("n1", LeaveReason.CANCELLED, 30.0))
    assert agree(run, 7, 9, 8).message.detail == "cancelled"
