"""Ranks and sizes."""

from __future__ import annotations

from slurm_elastic.rendezvous.membership.agents import Reason
from slurm_elastic.rendezvous.membership.assignment import build_table
from tests.unit.rendezvous.helpers.scenario import candidate


def test_agents_are_ranked_in_slurms_order_whatever_order_they_joined_in() -> None:
    joined = [candidate("b", position=1), candidate("c", position=0), candidate("a", position=2)]
    table = build_table(0, Reason.START, joined, 0)
    assert [place.agent for place in table.places] == ["c", "b", "a"]
    assert [place.rank for place in table.places] == [0, 1, 2]


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


def test_survivors_and_joiners_keep_the_order_of_their_domains() -> None:
    everyone = [candidate(f"n{number}", number, domain=f"s{number % 2}") for number in range(6)]
    names = [place.agent for place in build_table(0, Reason.START, everyone, 0).places]
    assert names == ["n0", "n2", "n4", "n1", "n3", "n5"]
    for lost in range(6):
        survivors = everyone[:lost] + everyone[lost + 1 :]
        table = build_table(1, Reason.NODE_LOST, survivors, 0)
        assert [place.agent for place in table.places] == [name for name in names if name != f"n{lost}"]


def test_one_label_for_all_nodes_is_as_none() -> None:
    names = [f"n{number}" for number in range(10_000)]
    tables = [
        build_table(0, Reason.START, (candidate(name, domain=label) for name in names), 0) for label in ("", "s0")
    ]
    assert [[place.agent for place in table.places] for table in tables] == [names, names]
    assert tables[1].places[-1].domain_base_rank == 9999


def test_a_topology_that_changes_between_requeues_ranks_the_nodes_anew() -> None:
    before, after = (
        build_table(round_, Reason.START, [candidate("n1", 0, domain=one), candidate("n2", 1, domain=two)], 0)
        for round_, one, two in ((0, "s1", "s2"), (1, "s7", "s3"))
    )
    assert [place.node for place in before.places] == ["n1", "n2"]
    assert [place.node for place in after.places] == ["n2", "n1"]
