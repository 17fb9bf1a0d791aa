"""Rounds of whole segments of one failure domain."""

from __future__ import annotations

import pytest

from slurm_elastic.errors import UsageError
from slurm_elastic.rendezvous.membership import Finish, LeaveReason, Left, Phase
from slurm_elastic.rendezvous.options import RendezvousOptions
from tests.unit.rendezvous.helpers.scenario import Scenario, only


def racks(segment: int, **settings: object) -> Scenario:
    """A run whose agent s1-a is in the domain s1."""
    options = RendezvousOptions.from_config({"segment": segment})
    least, most = options.node_range(1, 8)
    sizes = {"min_nodes": least, "max_nodes": most, "valid_nodes": options.valid_nodes}
    return Scenario(**sizes, segment=segment, **settings)


def test_a_round_has_whole_segments_and_the_rest_are_spares() -> None:
    nodes = ("s1-a", "s1-b", "s2-c", "s1-d", "s2-e")
    run = racks(2, expected_nodes=nodes)
    run.join(*nodes)
    assert run.members == ["s1-a", "s1-b", "s2-c", "s2-e"]


def test_a_segment_that_lost_a_node_is_spare_until_it_is_whole_again() -> None:
    nodes = ("s1-a", "s1-b", "s2-c", "s2-d")
    run = racks(2, expected_nodes=nodes)
    run.join(*nodes)
    run.on(Left("s2-c", LeaveReason.PREEMPTED))
    run.join("s1-a", "s1-b", "s2-d", last_round=0)
    run.wait(60.0)
    assert run.members == ["s1-a", "s1-b"]
    run.join("s3-x")
    run.wait(60.0)
    assert run.members == ["s1-a", "s1-b"], "no segment of s3 is whole"
    run.join("s2-e")
    run.wait(1.0)
    run.join("s1-a", "s1-b", last_round=1)
    assert run.members == ["s1-a", "s1-b", "s2-d", "s2-e"]


def test_segments_that_no_domain_can_hold_end_the_run_with_one_line() -> None:
    nodes = ("s1-a", "s1-b", "s2-c", "s2-d")
    run = racks(4, expected_nodes=nodes, join_timeout=60.0)
    run.join(*nodes)
    (finish,) = only(Finish, run.wait(100.0))
    assert finish.message.detail == "4 nodes came, and too few failure domains have 4 of them (--segment)"
    assert run.state.phase is Phase.CLOSED


def test_valid_numbers_are_multiples_of_the_segment() -> None:
    assert RendezvousOptions.from_config({"segment": 4, "node_unit": 6}).node_range(1, 40) == (12, 36)
    assert RendezvousOptions.from_config({"segment": 4, "valid_nodes": "2,4,6,8"}).valid_nodes == (4, 8)
    with pytest.raises(UsageError, match="--valid-nodes 2,6 has no multiple of --segment 4"):
        RendezvousOptions.from_config({"segment": 4, "valid_nodes": "2,6"})
    with pytest.raises(UsageError, match="--segment 'x' is no number of nodes"):
        RendezvousOptions.from_config({"segment": "x"})
