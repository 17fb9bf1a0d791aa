"""The agent's side: what it says again, and what it ignores."""

from __future__ import annotations

import pytest

from slurm_elastic.rendezvous.election.follower import Follower
from slurm_elastic.rendezvous.membership import (
    Closed,
    Connected,
    Finished,
    Joined,
    LeaveReason,
    Leaving,
    WorkerFailed,
    WorkerFailure,
)
from tests.unit.rendezvous.helpers.scenario import candidate

FAILURE = WorkerFailure("n0", "n0", rank=0, exit_code=1)


def running(round_: int = 4) -> Follower:
    follower, _ = Follower("n0").join(candidate("n0"))
    placed = follower.placed(1, round_)
    assert placed is not None
    return placed


def test_a_join_is_said_again_with_a_new_number_on_a_new_connection() -> None:
    follower, joined = Follower("n0").join(candidate("n0"))
    assert joined == Joined(candidate("n0"), 1, None)
    follower, greeting = follower.greet(now=100.0)
    assert greeting == (Connected("n0", None), Joined(candidate("n0"), 2, None))
    assert follower.placed(1, 0) is None, "it answers the older join"
    assert follower.placed(2, 0) is not None


def test_an_agent_that_gets_ready_says_on_each_connection_that_it_comes_until_it_joins_or_leaves() -> None:
    follower = Follower("n0", coming=True)
    assert follower.greet(now=100.0)[1] == (Connected("n0", None, coming=True),)
    assert follower.greet(now=101.0)[1] == (Connected("n0", None, coming=True),)
    joining, _ = follower.join(candidate("n0"))
    assert joining.greet(now=102.0)[1][0] == Connected("n0", None)
    leaving, _ = follower.leaving(LeaveReason.PREEMPTED, None, now=102.0)
    assert leaving.greet(now=103.0)[1][0] == Connected("n0", None)
    gone, _ = follower.left(LeaveReason.PREEMPTED, stopped=False)
    assert gone.greet(now=103.0)[1][0] == Connected("n0", None)


def test_a_farewell_is_said_again_to_a_leader_that_is_met_on_the_way_out() -> None:
    follower, leaving = running().leaving(LeaveReason.PREEMPTED, None, now=100.0)
    follower, left = follower.stopped().left(LeaveReason.PREEMPTED, stopped=False)
    assert follower.greet(now=101.0)[1] == (Connected("n0", None), leaving, left)


def test_a_join_says_what_the_last_leader_has_charged() -> None:
    follower, _ = running(4).charged(2).charged(1).stopped().join(candidate("n0"))
    assert follower.greet(now=100.0)[1] == (Connected("n0", None), Joined(candidate("n0"), 3, 4, restarts=2))


def test_workers_stop_once_when_no_leader_is_heard_and_the_next_join_says_so() -> None:
    cut_off = running(4).cut_off_now()
    assert cut_off is not None
    assert cut_off.cut_off_now() is None
    joining, joined = cut_off.stopped().join(candidate("n0"))
    assert joined == Joined(candidate("n0"), 2, 4, cut_off=True)
    placed = joining.placed(2, 5)
    assert placed is not None
    assert not placed.stopped().join(candidate("n0"))[1].cut_off, "that was the round before"


def test_nothing_has_to_stop_where_all_workers_have_ended_well_or_none_runs() -> None:
    finished, _ = running(4).finished()
    assert finished.cut_off_now() is None
    assert running(4).stopped().cut_off_now() is None
    # The others of its node run on.
    failed, _ = running(4).failed(FAILURE)
    assert failed.cut_off_now() is not None


def test_a_place_is_taken_once() -> None:
    assert running().placed(1, 4) is None


def test_a_member_says_which_round_it_runs() -> None:
    assert running(4).greet(now=100.0)[1] == (Connected("n0", 4),)


def test_an_interruption_of_an_older_round_is_ignored() -> None:
    follower = running(4)
    assert not follower.interrupted(3)
    assert follower.interrupted(4)
    assert not follower.stopped().interrupted(4)


def test_a_failure_is_said_again_even_before_the_next_join() -> None:
    follower, said = running(4).failed(FAILURE)
    assert said == WorkerFailed("n0", 4, FAILURE)
    follower, _ = follower.stopped().join(candidate("n0"))
    follower, greeting = follower.greet(now=100.0)
    assert greeting == (Connected("n0", None), said, Joined(candidate("n0"), 3, 4))
    placed = follower.placed(3, 5)
    assert placed is not None
    assert placed.greet(now=100.0)[1] == (Connected("n0", 5),), "the failure belongs to the round before"


def test_a_finish_is_said_again() -> None:
    follower, said = running(4).finished()
    assert follower.greet(now=100.0)[1] == (Connected("n0", 4), said)
    assert said == Finished("n0", 4)


def test_an_agent_that_leaves_says_so_again_and_wants_no_place() -> None:
    follower, _ = Follower("n0").join(candidate("n0"))
    follower, said = follower.leaving(LeaveReason.PREEMPTED, None, now=90.0)
    assert follower.placed(1, 0) is None
    assert follower.greet(now=100.0)[1] == (Connected("n0", None), said)
    assert said == Leaving("n0", LeaveReason.PREEMPTED)


def test_a_closed_run_is_closed_on_the_next_connection_too() -> None:
    follower, said = running().closing()
    assert said == Closed("n0")
    assert said in follower.greet(now=100.0)[1]


def test_workers_of_no_round_cannot_fail_or_finish() -> None:
    with pytest.raises(ValueError, match="never had a place"):
        Follower("n0").failed(FAILURE)
    with pytest.raises(ValueError, match="never had a place"):
        Follower("n0").finished()


def test_a_deadline_is_nearer_when_it_is_said_again() -> None:
    follower, said = running(4).leaving(LeaveReason.PREEMPTED, 30.0, now=90.0)
    assert said.seconds == 30.0
    assert follower.greet(now=100.0)[1] == (Connected("n0", 4), Leaving("n0", LeaveReason.PREEMPTED, 20.0))


def test_only_workers_that_run_are_asked_for_a_step_and_only_until_they_know_one() -> None:
    follower = running(4)
    assert follower.holding(4)
    assert not follower.holding(3)
    assert not follower.stopped().holding(4)
    assert follower.stopping(3, 17) is None
    told = follower.stopping(4, 17)
    assert told is not None
    assert told.stop == 17
    assert not told.holding(4), "an answer now would name a step that is past"
    assert told.stopping(4, 17) is not None, "there may be less time than it was told"
    assert told.stopped().stopping(4, 17) is None


def test_the_next_round_has_no_step_to_stop_at() -> None:
    told = running(4).stopping(4, 17)
    assert told is not None
    follower, joined = told.stopped().join(candidate("n0"))
    placed = follower.placed(joined.attempt, 5)
    assert placed is not None
    assert placed.holding(5)


def test_who_leaves_as_agreed_hears_when_the_others_have_stopped() -> None:
    follower, said = running(4).left(LeaveReason.PREEMPTED, stopped=True)
    assert said.stopped
    assert follower.interrupted(4)
    follower, _ = running(4).left(LeaveReason.PREEMPTED, stopped=False)
    assert not follower.interrupted(4)


def test_a_member_says_that_it_knows_of_the_end_of_the_round_that_it_still_runs() -> None:
    told = running(4).note_over()
    assert told.greet(now=100.0)[1] == (Connected("n0", 4, over=True),)
    assert told.stopped().greet(now=100.0)[1] == (Connected("n0", None),)
    joining, _ = told.stopped().join(candidate("n0"))
    placed = joining.placed(2, 5)
    assert placed is not None
    assert placed.greet(now=100.0)[1] == (Connected("n0", 5),), "that was the round before"
    lingering, left = running(4).left(LeaveReason.PREEMPTED, stopped=True)
    assert lingering.greet(now=100.0)[1] == (Connected("n0", 4, over=True), left)
