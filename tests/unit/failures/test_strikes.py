"""Strikes of nodes, and the nodes that the next start of a job does without."""

from __future__ import annotations

from typing import Any

import pytest

from slurm_elastic.failures.history import (
    EXPIRY,
    Strike,
    bad_domains,
    bad_nodes,
    node_domains,
    nodes_to_exclude,
    strikes,
)

NODES = dict.fromkeys(("n1", "n2", "n3", "n4"), "")


@pytest.mark.parametrize(
    ("event", "found"),
    [
        ({"event": "node_check_failed", "node": "n2", "nodes": ["n2"], "why": "no fan"}, [Strike("n2", 7.0, 2)]),
        (
            {"event": "round_ended", "node": "n1", "nodes": ["n2"], "domain": "node", "outlook": "elsewhere"},
            [Strike("n2", 7.0, 1)],
        ),
        ({"event": "worker_hung", "node": "n2", "rank": 3}, [Strike("n2", 7.0, 1)]),
        ({"event": "worker_hung", "node": "n2", "rank": 3, "in_collective": None}, [Strike("n2", 7.0, 1)]),
        ({"event": "worker_hung", "node": "n2", "rank": 3, "in_collective": False}, [Strike("n2", 7.0, 1)]),
        ({"event": "worker_hung", "node": "n2", "rank": 3, "in_collective": True}, []),
        ({"event": "round_ended", "nodes": ["n1"], "stragglers": [{"rank": 3, "node": "n2"}]}, [Strike("n2", 7.0, 1)]),
        (
            {"event": "run_ended", "nodes": ["n1"], "stragglers": [{"node": "n2"}, {"node": "n2"}, {"node": "n3"}]},
            [Strike("n2", 7.0, 1), Strike("n3", 7.0, 1)],
        ),
        ({"event": "round_ended", "nodes": ["n1"], "stragglers": [7, {"node": 3}, {}]}, []),
        ({"event": "rank_slow", "node": "n1", "nodes": ["n2"], "rank": 3}, [Strike("n2", 7.0, 1)]),
        ({"event": "rank_slow", "node": "n1", "nodes": ["n1"], "rank": 0}, []),
        ({"event": "rank_fast", "node": "n1", "nodes": ["n2"], "rank": 3}, []),
        ({"event": "round_ended", "nodes": ["n2"], "domain": "node", "outlook": "again"}, []),
        ({"event": "round_ended", "nodes": ["n2"], "domain": "user_code", "outlook": "not_again"}, []),
        ({"event": "round_ended", "nodes": ["n2"], "reason": "node_lost"}, []),
        ({"event": "node_lost", "nodes": ["n2"]}, []),
        ({"event": "node_check_failed", "nodes": "n2"}, []),
        ({"event": "node_check_failed", "nodes": [2]}, []),
        ({}, []),
    ],
)
def test_what_speaks_against_a_node(event: dict[str, Any], found: list[Strike]) -> None:
    assert strikes([(7.0, event)]) == tuple(found)


def test_the_node_that_the_others_have_waited_for_gets_the_strike() -> None:
    hung = [(1.0, {"event": "worker_hung", "node": node, "round": 4, "in_collective": None}) for node in ("n1", "n3")]
    ended = (2.0, {"event": "round_ended", "round": 4, "nodes": ["n1"], "stragglers": [{"rank": 1, "node": "n2"}]})
    other = (3.0, {"event": "worker_hung", "node": "n4", "round": 5, "in_collective": False})
    assert strikes([*hung, ended, other]) == (Strike("n2", 2.0, 1), Strike("n4", 3.0, 1))


@pytest.mark.parametrize(
    ("formed", "nodes", "found"),
    [
        (50.0, ["n1", "n3"], (Strike("n2", 100.0, 2),)),
        # It was there, the round is older than its search or later than its end, or there was none: no leader lived.
        (50.0, ["n1", "n2"], ()),
        (39.0, ["n1", "n3"], ()),
        (101.0, ["n1", "n3"], ()),
        (None, [], ()),
    ],
)
def test_a_node_that_reaches_no_leader_while_the_others_have_one(
    formed: float | None, nodes: list[str], found: tuple[Strike, ...]
) -> None:
    ended = (100.0, {"event": "agent_ended", "node": "n2", "exit_code": 75, "no_leader_for": 60})
    rounds = [] if formed is None else [(formed, {"event": "round_formed", "nodes": nodes})]
    assert strikes([*rounds, ended]) == found
    assert strikes([*rounds, (100.0, {"event": "agent_ended", "node": "n2"})]) == ()


def test_the_end_of_a_run_explains_its_newest_round() -> None:
    hung = {"event": "worker_hung", "node": "n1", "round": 4}
    ended = {"event": "run_ended", "nodes": ["n1"], "stragglers": [{"rank": 1, "node": "n2"}]}
    earlier = {"event": "worker_hung", "node": "n3", "round": 3}
    assert strikes([(1.0, earlier), (2.0, hung), (3.0, ended)]) == (Strike("n3", 1.0, 1), Strike("n2", 3.0, 1))


@pytest.mark.parametrize(
    ("given", "bad"),
    [
        ([("n1", 2)], ("n1",)),
        ([("n1", 1)], ()),
        ([("n1", 1), ("n1", 1)], ("n1",)),
        ([("n1", 1), ("n1", 1), ("n2", 2), ("n2", 2), ("n3", 2)], ("n2", "n3")),
        ([(node, 2) for node in NODES], ()),
        ([], ()),
    ],
)
def test_the_worst_nodes(given: list[tuple[str, int]], bad: tuple[str, ...]) -> None:
    found = [Strike(node, float(time), weight) for time, (node, weight) in enumerate(given)]
    assert nodes_to_exclude(bad_nodes(found, 100.0), NODES, 2) == bad


def test_strikes_expire() -> None:
    found = [Strike("n1", 0.0, 2), Strike("n2", EXPIRY / 2, 2)]
    assert bad_nodes(found, EXPIRY - 1) == ("n2", "n1")
    assert bad_nodes(found, EXPIRY + 1) == ("n2",)
    assert bad_nodes(found, 2 * EXPIRY) == ()


@pytest.mark.parametrize(
    ("bad", "most", "excluded"),
    [
        (["n5", "n3", "n1"], 1, ("n5", "n3", "n1", "n7")),
        (["n2", "n5", "n3", "n1"], 2, ("n2", "n5", "n3", "n1", "n7")),
        (["n2", "n5", "n3", "n1"], 1, ("n2",)),
        # Two bad nodes are two bad nodes, and so are those of no domain.
        (["n3", "n1", "n2"], 3, ("n3", "n1", "n2")),
        (["n8", "n9", "n10"], 2, ("n8", "n9")),
        # It is not the nodes if all are bad, and not one domain if all are.
        (
            ["n1", "n3", "n5", "n2", "n4", "n6", "n8", "n9", "n10"],
            9,
            ("n1", "n3", "n5", "n2", "n4", "n6", "n8", "n9", "n10"),
        ),
    ],
)
def test_three_bad_nodes_of_a_switch_are_the_switch(bad: list[str], most: int, excluded: tuple[str, ...]) -> None:
    domains = {f"n{number}": ("s2", "s1")[number % 2] if number < 8 else "" for number in range(1, 11)}
    assert nodes_to_exclude(bad, domains, most) == excluded


def test_a_job_is_no_place() -> None:
    labels = {"n1": "7", "n2": "7/s0/s1", "n3": "3_12/s0/s1", "n4": "3_12", "n5": "rack7", "n6": "8"}
    started = [
        (float(number), {"event": "agent_started", "node": node, "agent": f"{node}/7.0/100", "domain": label})
        for number, (node, label) in enumerate(labels.items())
    ]
    formed = (-1.0, {"event": "round_formed", "nodes": ["n1", "n9", 4]})
    places = {"n1": "", "n9": "", "n2": "s0/s1", "n3": "s0/s1", "n4": "", "n5": "rack7", "n6": "8"}
    assert node_domains([*reversed(started), formed]) == places
    moved = (9.0, {**started[1][1], "domain": "7/s0/s4"})
    assert node_domains([moved, *started])["n2"] == "s0/s4"
    assert bad_domains(["n2", "n3", "n4"], places) == {}
    assert bad_domains(places, {**places, "n5": "s0/s1"}) == {"s0/s1": 3}
