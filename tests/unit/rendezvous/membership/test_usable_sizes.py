"""Numbers of nodes that the script cannot use: learned from rounds, charged to no worker, and tried no second time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from slurm_elastic.rendezvous.membership import (
    STEPPED,
    Base,
    Decision,
    Finish,
    Interrupt,
    LeaveReason,
    Leaving,
    Left,
    Outcome,
    Phase,
    Ponged,
    Publish,
    Reason,
    Spare,
)
from slurm_elastic.rendezvous.run_events import describe
from tests.unit.rendezvous.helpers.scenario import Scenario, failed, only

WHY = "AssertionError: batch 16 not divisible by 3"


def fails(run: Scenario, *names: str, ran: float = 0.5, **changes: Any) -> tuple[Decision, ...]:
    """Workers of these agents fail by themselves; all members answer, and their agents join again."""
    assert run.state.table is not None
    table, members, decisions = run.state.table, run.members, ()
    for name in names:
        event = failed(name, table.round)
        failure = replace(event.failure, message=WHY, ran=ran, script="train.py", **changes)
        decisions += run.on(replace(event, failure=failure))
    for name in members:
        decisions += run.on(Ponged(name, run.state.probe))
    decisions += run.wait(1.1)
    if run.state.phase is Phase.FORMING:
        decisions += run.join(*members, last_round=table.round)
    return decisions


def ends(run: Scenario, *gone: str, ran: float = STEPPED) -> tuple[Decision, ...]:
    """The members join again after an interruption for others, but for those that leave now."""
    table = run.state.table
    assert table is not None
    decisions: tuple[Decision, ...] = ()
    for name in gone:
        decisions += run.on(Leaving(name, LeaveReason.PREEMPTED))
        decisions += run.on(Left(name, LeaveReason.PREEMPTED))
    stay = [place.agent for place in table.places if place.agent not in gone]
    return decisions + run.join(*stay, last_round=table.round, ran=ran)


def grown(*, ran: float = STEPPED, **settings: Any) -> Scenario:
    """Two nodes have trained, and a third has joined: its round runs."""
    run = Scenario(**{"min_nodes": 2, "max_restarts": 0, **settings})
    run.join("n0", "n1")
    run.wait(1.0)
    if len(run.members) == 2:
        run.join("n2")
        run.wait(1.0)
        ends(run, ran=ran)
    assert run.members == ["n0", "n1", "n2"]
    return run


def test_a_join_does_not_end_a_run_that_cannot_use_it() -> None:
    run = grown()
    decisions = fails(run, "n0", "n1", "n2")
    (end,) = only(Interrupt, decisions)
    assert (run.members, run.state.restarts) == (["n0", "n1"], 0)
    assert [spare.node for spare in only(Spare, decisions)] == ["n2"]
    entry = describe(end)
    assert entry is not None
    assert entry.text == (
        f"round 1 ends: with 3 nodes train.py failed before its first step ({WHY}); going on with 2: --valid-nodes=2"
    )
    assert entry.fields["unusable"] == 3
    # The next one on record tells a later leader.
    (published,) = only(Publish, decisions)
    assert (published.table.ran, published.table.unusable) == (((2, STEPPED),), (3,))


def test_a_number_that_was_not_tried_is_tried_and_the_one_that_failed_never_again() -> None:
    run = grown()
    fails(run, "n0", "n1", "n2")
    assert only(Spare, run.join("n3")) == [], "four nodes may do"
    run.wait(1.0)
    ends(run)
    assert run.members == ["n0", "n1", "n2", "n3"]
    ends(run, "n3")
    assert run.members == ["n0", "n1"], "not three"
    assert len(only(Spare, run.join("n4"))) == 0


def test_a_node_that_has_trained_has_its_place_before_one_that_has_not() -> None:
    run = Scenario(min_nodes=1, max_restarts=0)
    run.join("n1")
    run.wait(1.0)
    run.join("n0", "n2")
    run.wait(1.0)
    ends(run)
    assert run.members == ["n0", "n1", "n2"]
    # All nodes but one are bad.
    fails(run, "n0", "n2")
    assert run.members == ["n1"]


@pytest.mark.parametrize("reported", [True, False])
def test_a_failure_after_the_first_step_is_charged(reported: bool) -> None:
    """Where no step is reported, by the time: it has run for as long as the round before, or for minutes."""
    run = grown(ran=STEPPED if reported else 8.0)
    (finish,) = only(Finish, fails(run, "n0", "n1", "n2", ran=STEPPED if reported else 33.0))
    assert finish.message.outcome is Outcome.FAILED


def test_a_round_that_was_interrupted_at_its_start_has_not_worked() -> None:
    run = grown(ran=1.0)
    assert only(Finish, fails(run, "n0", "n1", "n2", ran=5.0))


def test_a_round_that_failed_has_not_worked() -> None:
    run = Scenario(min_nodes=2, max_restarts=1)
    run.join("n0", "n1", "n2")
    fails(run, "n0", "n1", "n2", ran=9.0)
    assert run.state.restarts == 1
    ends(run, "n2", ran=0.0)
    assert run.members == ["n0", "n1"]
    assert only(Finish, fails(run, "n0", "n1", ran=0.1)), "charged: no number has worked"


def test_a_number_that_has_worked_itself_is_charged() -> None:
    run = grown(max_restarts=1)
    ends(run, "n2")
    run.join("n2")
    run.wait(1.0)
    ends(run)
    assert run.members == ["n0", "n1", "n2"]
    fails(run, "n0", "n1", "n2")
    assert (run.state.restarts, run.members) == (1, ["n0", "n1", "n2"])


def test_a_script_that_fails_with_each_number_ends_the_run() -> None:
    run = grown()
    fails(run, "n0", "n1", "n2")
    assert run.members == ["n0", "n1"]
    # What worked before does so no more, and what failed is no way out.
    (finish,) = only(Finish, fails(run, "n0", "n1"))
    assert finish.message.outcome is Outcome.FAILED


@pytest.mark.parametrize("others", ["do not fail", "fail because of it"])
def test_a_node_that_joins_and_fails_alone_is_charged(others: str) -> None:
    run = grown(max_restarts=1)
    if others == "fail because of it":
        peer = failed("n0", 1)
        run.on(replace(peer, failure=replace(peer.failure, ran=0.5, consequence=True)))
    (end,) = only(Interrupt, fails(run, "n2"))
    assert (end.message.node, end.unusable, run.state.restarts) == ("n2", None, 1)
    assert run.members == ["n0", "n1", "n2"]


def test_the_others_have_a_second_to_fail_too() -> None:
    run = grown()
    first, second = failed("n2", 1), failed("n1", 1)
    run.on(replace(first, failure=replace(first.failure, ran=0.5)))
    for name in run.members:
        run.on(Ponged(name, run.state.probe))
    assert not run.wait(0.9)
    run.on(replace(second, failure=replace(second.failure, ran=1.4)))
    (end,) = only(Interrupt, run.wait(0.2))
    assert end.unusable == 3


def lost_one(**settings: Any) -> Scenario:
    """Of four nodes that have trained one is gone."""
    nodes = ("n0", "n1", "n2", "n3")
    given = {"min_nodes": 1, "max_restarts": 0, "join_timeout": 60.0, "expected_nodes": nodes, **settings}
    run = Scenario(**given)
    run.join(*nodes)
    ends(run, "n3")
    return run


def test_after_a_loss_a_smaller_number_is_tried() -> None:
    run = lost_one()
    (end,) = only(Interrupt, fails(run, "n0", "n1", "n2"))
    assert end.message.detail.endswith("; going on with 2: --valid-nodes=4")
    assert (run.members, run.state.restarts) == (["n0", "n1"], 0)
    run.join("n4")
    run.wait(1.0)
    ends(run)
    assert len(run.members) == 4, "which has worked"


def test_after_a_loss_a_run_for_which_nothing_works_waits_for_nodes() -> None:
    run = lost_one(min_nodes=3)
    (end,) = only(Interrupt, fails(run, "n0", "n1", "n2"))
    assert end.message.detail.endswith("; waiting 60 s for other nodes: --valid-nodes=4")
    assert not run.wait(50.0)
    run.join("n4")
    assert run.members == ["n0", "n1", "n2", "n4"]


def test_it_ends_with_the_reason_when_none_comes() -> None:
    run = lost_one(min_nodes=3)
    fails(run, "n0", "n1", "n2")
    (finish,) = only(Finish, run.wait(70.0))
    why = f"with 3 nodes train.py failed before its first step ({WHY}); no other nodes came within 60 s"
    assert (finish.message.outcome, finish.message.detail) == (Outcome.TIMED_OUT, why)
    assert finish.message.failure is not None


def test_a_later_leader_goes_by_the_record_and_by_what_members_say() -> None:
    base = Base(4, ("n0", "n1", "n2", "n3"), ("n0", "n1", "n2", "n3"), "n3")
    run = Scenario(
        max_restarts=0,
        first_round=5,
        first_reason=Reason.NODE_LOST,
        base=base,
        gone=frozenset({"n3"}),
        first_ran=((2, STEPPED),),
        first_unusable=(1,),
    )
    run.join("n0", "n1", "n2", last_round=4, ran=7.0)
    assert run.members == ["n0", "n1", "n2"]
    fails(run, "n0", "n1", "n2")
    assert run.members == ["n0", "n1"]
    (published,) = only(Publish, ends(run, "n1"))
    assert published.table.ran == ((2, STEPPED), (4, 7.0))
    assert run.members == ["n0", "n2"], "not one"


def test_valid_nodes_hold() -> None:
    run = lost_one(min_nodes=2, valid_nodes=(2, 4, 8))
    assert run.members == ["n0", "n1"]
    fails(run, "n0", "n1")
    assert run.state.phase is Phase.FORMING
    run.join("n4")
    assert len(run.members) == 4
