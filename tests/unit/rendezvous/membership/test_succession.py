"""A leader that follows another, and one that goes."""

from __future__ import annotations

import pytest

from slurm_elastic.rendezvous.membership import (
    Base,
    Claim,
    Claimed,
    Connected,
    Disconnected,
    Event,
    Finish,
    Gone,
    Held,
    Holding,
    Interrupt,
    Joined,
    LeaveReason,
    Leaving,
    Left,
    NodesDown,
    OnTie,
    Outcome,
    Phase,
    Ponged,
    Publish,
    Reason,
    Resign,
    Resigned,
    Stopping,
    blocks_election,
    missing,
)
from slurm_elastic.rendezvous.run_events import describe
from tests.unit.rendezvous.helpers.scenario import Scenario, candidate, failed, only, sent

LAST = Base(4, ("n0", "n1", "n2", "n3"), ("n0", "n1", "n2", "n3"), leader="n0")


def successor(**settings: object) -> Scenario:
    """The leader on n1 that follows the one on n0."""
    return Scenario(
        **{
            "agent": "n1",
            "base": LAST,
            "claimed": False,
            "first_round": 5,
            "first_reason": Reason.NODE_LOST,
            "first_node": "n0",
            "first_restarts": 2,
            **settings,
        }
    )


def test_the_epoch_is_claimed_with_a_majority_and_published_with_all_that_can_come() -> None:
    run = successor(gone=frozenset({"n0"}))
    assert not run.join("n1", last_round=4)
    assert only(Claim, run.join("n2", last_round=4)) == [Claim("n0")]
    # Somebody that may come at once is worth waiting for, and the epoch has not been taken yet.
    assert not run.on(Claimed())
    (publish,) = only(Publish, run.join("n3", last_round=4))
    assert (publish.table.round, publish.table.reason, publish.table.restarts) == (5, Reason.NODE_LOST, 2)
    assert run.members == ["n1", "n2", "n3"]


def test_a_charge_that_the_last_leader_told_its_members_and_nobody_else_still_counts() -> None:
    run = successor(gone=frozenset({"n0"}))
    run.on(Joined(candidate("n1"), 1, last_round=4, restarts=2))
    run.on(Joined(candidate("n2"), 1, last_round=4, restarts=3))
    run.on(Claimed())
    (publish,) = only(Publish, run.on(Joined(candidate("n3"), 1, last_round=4, restarts=1)))
    assert publish.table.restarts == 3


def test_who_was_no_member_is_in_the_way_of_members_that_are_not_enough() -> None:
    run = successor(agent="n9")
    run.join("n9")
    assert not blocks_election(run.state), "there is nobody whom it keeps"
    run.join("n1", last_round=4)
    assert blocks_election(run.state)
    run.join("n2", last_round=4)
    assert blocks_election(run.state), "half of them, without the leader"
    run.join("n3", last_round=4)
    assert not blocks_election(run.state)
    member = successor()
    member.join("n1", last_round=4)
    assert not blocks_election(member.state)


def test_nothing_is_published_before_the_epoch_is_taken() -> None:
    run = successor(gone=frozenset({"n0", "n3"}))
    assert [type(decision) for decision in run.join("n1", "n2", last_round=4)] == [Claim]
    assert not run.wait(10.0)
    assert only(Publish, run.on(Claimed()))


def test_a_leader_that_fell_silent_is_not_waited_for_again() -> None:
    run = successor(silent=frozenset({"n0"}))
    run.join("n1", "n2", last_round=4)
    run.join("n3", last_round=4)
    assert only(Publish, run.on(Claimed()))
    assert run.members == ["n1", "n2", "n3"]


def test_a_member_that_never_comes_is_waited_for_as_long_as_a_silent_one() -> None:
    run = successor(gone=frozenset({"n0"}), heartbeat_limit=3.0)
    run.join("n1", "n2", last_round=4)
    assert not run.on(Claimed())
    assert missing(run.state) == ("n3",)
    assert not run.wait(2.9)
    assert only(Publish, run.wait(0.2))


def test_a_member_that_has_ended_is_not_waited_for() -> None:
    run = successor(gone=frozenset({"n0"}))
    run.join("n1", "n2", last_round=4)
    run.on(Claimed())
    assert only(Publish, run.on(Gone(frozenset({"n3"}))))


def test_a_member_that_has_found_the_leader_is_waited_for_until_it_has_no_workers() -> None:
    run = successor(gone=frozenset({"n0"}))
    (interrupt,) = only(Interrupt, run.on(Connected("n3", running=4)))
    assert (interrupt.agents, interrupt.message.reason, interrupt.message.node) == (("n3",), Reason.NODE_LOST, "n0")
    run.join("n1", "n2", last_round=4)
    run.on(Claimed())
    assert not run.wait(60.0)
    assert only(Publish, run.join("n3", last_round=4))


@pytest.mark.parametrize("on_tie", OnTie)
def test_the_half_of_the_leader_goes_on_unless_none_shall(on_tie: OnTie) -> None:
    run = Scenario(agent="n0", expected_nodes=("n0", "n1"), on_tie=on_tie)
    run.join("n0", "n1")
    run.on(Disconnected("n1"))
    run.wait(0.2)
    decisions = run.join("n0", last_round=0)
    assert bool(only(Publish, decisions)) is (on_tie is OnTie.LEADER)
    if on_tie is OnTie.NONE:
        assert missing(run.state) == ("n1",)
        # The other is back, or known to be gone.
        assert only(Publish, run.on(Gone(frozenset({"n1"}))))


def test_a_minority_waits_for_others_and_gives_up_in_the_end() -> None:
    run = successor(join_timeout=20.0)
    assert not run.join("n1", last_round=4)
    assert missing(run.state) == ("n0", "n2", "n3")
    (finish,) = only(Finish, run.wait(21.0))
    assert finish.message.outcome is Outcome.TIMED_OUT
    assert finish.message.detail == "no majority of the last round came within 20 s"


def test_a_minority_goes_on_once_the_others_are_known_to_be_gone() -> None:
    run = successor()
    run.join("n1", last_round=4)
    assert not run.on(Gone(frozenset({"n0"})))
    assert only(Claim, run.on(NodesDown(frozenset({"n2", "n3"}))))
    assert only(Publish, run.on(Claimed()))


def test_a_leader_that_loses_most_of_its_members_does_not_go_on_alone() -> None:
    run = Scenario(agent="n0", expected_nodes=("n0", "n1", "n2"))
    run.join("n0", "n1", "n2")
    run.on(Disconnected("n1"))
    run.on(Disconnected("n2"))
    run.wait(0.2)
    run.join("n0", last_round=0)
    assert not run.wait(5.0)
    assert missing(run.state) == ("n1", "n2")
    # Two can be: n0 and n2, or n0 alone, which is half of the two that may live and was the leader.
    assert only(Publish, run.on(Gone(frozenset({"n1"}))))


def test_nobody_goes_on_alone_while_a_whole_round_that_leaves_may_have_workers() -> None:
    run = Scenario(agent="leader")
    run.join("n0")
    run.wait(4.0, "n0")
    run.join("n1")
    assert missing(run.state) == ("n0",)
    assert not run.on(Leaving("n0", LeaveReason.DRAINED))
    assert missing(run.state) == ("n0",)
    assert only(Publish, run.on(Left("n0", LeaveReason.DRAINED)))


@pytest.mark.parametrize(
    "proof", [Gone(frozenset({"n0"})), NodesDown(frozenset({"n0"})), Left("n0", LeaveReason.FAILED)]
)
def test_nobody_goes_on_for_a_silent_member_that_said_it_goes_before_its_end_is_known(proof: Event) -> None:
    run = Scenario(agent="leader", max_nodes=1)
    run.join("n0", "n1")
    run.on(Leaving("n0", LeaveReason.PREEMPTED))
    assert not only(Publish, run.wait(4.0, "n0"))
    assert missing(run.state) == ("n0",)
    assert only(Publish, run.on(proof))


@pytest.mark.parametrize("end", [Left("n0", LeaveReason.PREEMPTED), Gone(frozenset({"n0"}))])
def test_what_a_member_said_before_its_end_and_is_heard_after_it_keeps_nobody_waiting(end: Event) -> None:
    run = Scenario(agent="leader")
    run.join("n0")
    run.on(end)
    run.on(Leaving("n0", LeaveReason.PREEMPTED, 1.0))
    assert missing(run.state) == ()
    assert only(Publish, run.join("n1"))


def test_a_member_that_slurm_took_for_dead_and_that_says_it_goes_may_have_workers() -> None:
    run = Scenario(agent="leader", max_nodes=1)
    run.join("n0")
    run.wait(4.0, "n0")
    run.on(NodesDown(frozenset({"n0"})))
    run.on(Leaving("n0", LeaveReason.PREEMPTED, 1.0))
    assert not only(Publish, run.join("n1"))
    assert only(Publish, run.on(Left("n0", LeaveReason.PREEMPTED)))


def test_a_silent_member_that_said_it_goes_is_not_missed_by_others_of_its_round() -> None:
    run = Scenario(agent="n0", expected_nodes=("n0", "n1", "n2"))
    run.join("n0", "n1", "n2")
    run.on(Leaving("n1", LeaveReason.PREEMPTED))
    run.on(Leaving("n2", LeaveReason.PREEMPTED))
    run.wait(4.0, "n1", "n2")
    # Their workers take no step without those that have stopped here.
    assert only(Publish, run.join("n0", last_round=0))


def test_a_member_that_comes_counts_whatever_slurm_said() -> None:
    run = successor(agent="n3", gone=frozenset({"n0"}))
    run.join("n3", last_round=4)
    assert not run.on(NodesDown(frozenset({"n1"})))
    assert only(Claim, run.join("n1", last_round=4))


def test_a_leader_does_not_resign_before_its_own_workers_have_ended() -> None:
    run = Scenario(agent="n0", max_nodes=1)
    run.join("n0", "n1")
    run.on(Leaving("n0", LeaveReason.PREEMPTED))
    assert not only(Resign, run.wait(4.0, "n0"))
    assert only(Resign, run.on(Left("n0", LeaveReason.PREEMPTED)))


def test_a_leader_whose_agent_leaves_resigns_when_nobody_has_workers() -> None:
    run = Scenario(agent="n0", expected_nodes=("n0", "n1", "n2"))
    run.join("n0", "n1", "n2")
    run.on(Leaving("n0", LeaveReason.PREEMPTED))
    run.join("n1", last_round=0)
    run.on(Left("n0", LeaveReason.PREEMPTED))
    assert run.state.phase is Phase.FORMING
    assert only(Resign, run.join("n2", last_round=0)) == [Resign(("n1", "n2"), Resigned("n0", ("n0",)), everyone=True)]
    assert not run.wait(5.0)


def test_a_leader_that_is_a_spare_ends_the_round_to_resign() -> None:
    run = Scenario(agent="n2", max_nodes=2, min_nodes=2)
    run.join("n0", "n1", "n2")
    run.join("n2")
    assert only(Interrupt, run.on(Left("n2", LeaveReason.DRAINED)))
    assert only(Resign, run.join("n0", "n1", last_round=0)) == [
        Resign(("n0", "n1"), Resigned("n2", ("n2",)), everyone=True)
    ]


def test_a_leader_that_has_finished_stays_for_the_others() -> None:
    run = Scenario(agent="n0", expected_nodes=("n0", "n1"))
    run.join("n0", "n1")
    assert not only(Resign, run.on(Left("n0", LeaveReason.FINISHED)))
    assert run.state.phase is Phase.RUNNING


def hosted(**settings: object) -> Scenario:
    """A leader without workers, which is none of the agents."""
    return Scenario(**{"agent": "s0", "min_nodes": 2, **settings})


def test_a_leader_without_workers_waits_for_agents_as_long_as_it_takes() -> None:
    run = hosted(join_timeout=60.0)
    assert not run.wait(7200.0)
    # From then on somebody waits, and the time is counted.
    run.join("n0")
    assert not run.wait(59.0)
    (finish,) = only(Finish, run.wait(2.0))
    assert finish.message.outcome is Outcome.TIMED_OUT


def test_a_leader_without_workers_has_no_place_and_counts_for_no_minimum() -> None:
    run = hosted()
    assert not run.on(Connected("s0", None))
    assert not run.join("n0")
    (publish,) = only(Publish, run.join("n1"))
    assert [place.agent for place in publish.table.places] == ["n0", "n1"]
    assert run.state.base is not None
    assert run.state.base.leader == "s0"


def test_a_leader_without_workers_ends_the_round_to_resign() -> None:
    run = hosted(leave_margin=5.0)
    run.join("n0", "n1")
    (interrupt,) = only(Interrupt, run.on(Leaving("s0", LeaveReason.PREEMPTED, 30.0)))
    assert (interrupt.agents, interrupt.message.reason) == (("n0", "n1"), Reason.NODE_LEFT)
    assert not run.on(Leaving("s0", LeaveReason.PREEMPTED, 29.0))
    assert only(Resign, run.join("n0", "n1", last_round=0)) == [Resign(("n0", "n1"), Resigned("s0"), everyone=True)]


def test_workers_stop_in_the_time_that_a_leader_without_workers_has() -> None:
    run = hosted(answers=True, leave_margin=5.0)
    run.join("n0", "n1")
    assert sent(Holding, run.on(Leaving("s0", LeaveReason.PREEMPTED, 30.0)))
    run.on(Held("n0", 0, 7))
    (stop,) = sent(Stopping, run.on(Held("n1", 0, 9)))
    assert (stop.message.step, stop.message.seconds) == (9, 25.0)


def test_a_failed_worker_is_charged_before_a_leader_without_workers_goes() -> None:
    run = hosted(max_restarts=1)
    run.join("n0", "n1")
    run.on(failed("n0"))
    assert not run.on(Leaving("s0", LeaveReason.PREEMPTED))
    run.on(Ponged("n0", 1))
    run.on(Ponged("n1", 1))
    (interrupt,) = only(Interrupt, run.wait(0.5))
    assert (interrupt.message.reason, run.state.restarts) == (Reason.WORKER_FAILED, 1)
    assert only(Resign, run.join("n0", "n1", last_round=0))


def test_a_leader_without_workers_goes_at_once_if_nobody_is_there() -> None:
    run = hosted()
    assert only(Resign, run.on(Leaving("s0", LeaveReason.PREEMPTED)))
    # So does an agent that leads and has not joined yet.
    run = Scenario(agent="n0")
    assert only(Resign, run.on(Leaving("n0", LeaveReason.PREEMPTED)))


@pytest.mark.parametrize(
    ("reason", "over", "on_record"),
    [(Reason.NODE_LOST, False, False), (Reason.NODE_LOST, True, True), (Reason.NODE_LEFT, False, True)],
)
def test_the_end_of_a_round_is_not_written_down_again_for_whoever_knows_of_it_or_after_a_leader_that_has_resigned(
    reason: Reason, over: bool, on_record: bool
) -> None:
    run = successor(first_reason=reason)
    (interrupt,) = only(Interrupt, run.on(Connected("n3", 4, over=over)))
    assert (interrupt.agents, interrupt.message.round, interrupt.on_record) == (("n3",), 4, on_record)
    assert (describe(interrupt) is None) is on_record
