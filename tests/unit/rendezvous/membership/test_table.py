"""Ranks and sizes."""

from __future__ import annotations

from slurm_elastic.rendezvous.membership.agents import Reason
from slurm_elastic.rendezvous.membership.assignment import build_table
from tests.unit.rendezvous.helpers.scenario import candidate


def test_without_positions_numbers_in_node_names_count_by_value() -> None:
    names = ["rack2-node10", "rack10-node1", "rack2-node9", "login"]
    table = build_table(0, Reason.START, map(candidate, names), 0)
    assert [place.agent for place in table.places] == ["login", "rack2-node9", "rack2-node10", "rack10-node1"]


def test_workers_are_counted_over_all_and_within_their_role() -> None:
    joined = [
        candidate("n0", workers=2),
        candidate("n1", workers=1, role="evaluator"),
        candidate("n2", workers=4),
    ]
    table = build_table(3, Reason.NODE_JOINED, joined, 1)
    assert table.world_size == 7
    assert [place.base_rank for place in table.places] == [0, 2, 3]
    assert [place.role_base_rank for place in table.places] == [0, 0, 2]
    assert [place.role_world_size for place in table.places] == [6, 1, 6]
    assert (table.store_address, table.store_port) == ("n0.cluster", 20000)
    assert (table.round, table.restarts) == (3, 1)


def test_ranks_of_a_failure_domain_are_beside_each_other_in_the_natural_order_of_labels() -> None:
    elements = ["7_10", "7_2"]
    joined = [candidate(f"{element}-n{node}", node, 2, domain=element) for node in range(3) for element in elements]
    table = build_table(0, Reason.START, joined, 0)
    assert [place.domain for place in table.places] == 3 * ["7_2"] + 3 * ["7_10"]
    assert [place.domain_base_rank for place in table.places] == [0, 2, 4, 0, 2, 4]
    assert {place.domain_world_size for place in table.places} == {6}


def test_a_node_without_a_label_does_not_take_rank_0_from_those_that_have_one() -> None:
    table = build_table(0, Reason.START, [candidate("n3", 0), candidate("n1", 0, domain="7")], 0)
    assert [place.node for place in table.places] == ["n1", "n3"]
