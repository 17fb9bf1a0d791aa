"""Rounds that may have some numbers of nodes only: the largest valid number trains, the others are spares."""

from __future__ import annotations

import pytest

from slurm_elastic.rendezvous.membership import Interrupt, LeaveReason, Left, Publish, Reason, Settings, Spare
from tests.unit.rendezvous.helpers.scenario import Scenario, only

PAIRS = range(2, 100, 2)


@pytest.mark.parametrize(
    ("agents", "size"), [(0, 0), (1, 0), (2, 2), (3, 2), (4, 4), (7, 4), (8, 8), (9, 8), (16, 8), (100, 8)]
)
def test_a_round_takes_the_largest_valid_number(agents: int, size: int) -> None:
    assert Settings(2, 8, (2, 4, 8)).round_size(agents) == size


def test_every_number_is_valid_by_default() -> None:
    assert [Settings(2, 4).round_size(agents) for agents in range(6)] == [0, 0, 2, 3, 4, 4]


def test_who_is_above_the_largest_valid_number_is_a_spare() -> None:
    run = Scenario(min_nodes=2, valid_nodes=PAIRS, expected_nodes=("n0", "n1", "n2"))
    run.join("n0", "n1")
    assert run.members == ["n0", "n1"], "n2 would make no larger round"
    assert only(Spare, run.join("n2"))
    assert not run.wait(10.0)


def test_a_spare_and_a_joiner_make_the_next_valid_number() -> None:
    run = Scenario(min_nodes=2, valid_nodes=(2, 4, 8))
    run.join("n0", "n1")
    assert only(Spare, run.join("n2"))
    assert not run.wait(10.0)
    run.join("n3")
    (interrupt,) = only(Interrupt, run.wait(0.1))
    assert (interrupt.message.reason, interrupt.message.node) == (Reason.NODE_JOINED, "n2, n3")
    run.join("n0", "n1", last_round=0)
    assert run.members == ["n0", "n1", "n2", "n3"]


def test_a_joiner_that_goes_again_ends_no_round() -> None:
    run = Scenario(min_nodes=2, valid_nodes=PAIRS, gather_quiet=0.5)
    run.join("n0", "n1", "n2", "n3")
    run.on(Left("n3", LeaveReason.FAILED))
    assert not run.wait(10.0)
    run.join("n4")
    assert only(Interrupt, run.wait(1.0))


def test_a_lost_member_makes_spares_and_comes_back_as_one_of_the_largest() -> None:
    run = Scenario(min_nodes=2, valid_nodes=PAIRS, reconnect_grace=0.1)
    run.join("n0", "n1")
    run.join("n2", "n3")
    run.wait(0.1)
    run.join("n0", "n1", last_round=0)
    assert run.members == ["n0", "n1", "n2", "n3"]
    run.on(Left("n1", LeaveReason.PREEMPTED))
    decisions = run.join("n0", "n2", "n3", last_round=1)
    assert only(Publish, decisions)
    assert [spare.node for spare in only(Spare, decisions)] == ["n3"]
    assert run.members == ["n0", "n2"]


def test_a_last_call_waits_only_for_nodes_that_make_the_round_larger() -> None:
    run = Scenario(min_nodes=2, valid_nodes=(2, 4), expected_nodes=("n0", "n1", "n2", "n3"), last_call_timeout=30.0)
    assert not run.join("n0", "n1")
    assert not run.wait(1.0)
    run.join("n2", "n3")
    assert run.members == ["n0", "n1", "n2", "n3"]
    run = Scenario(min_nodes=2, valid_nodes=(2, 4), expected_nodes=("n0", "n1", "n2"), last_call_timeout=30.0)
    run.join("n0", "n1")
    assert run.members == ["n0", "n1"]
