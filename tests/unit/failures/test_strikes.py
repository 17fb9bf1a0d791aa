"""Strikes of nodes, and the nodes that the next start of a job does without."""

from __future__ import annotations

from typing import Any

import pytest

from slurm_elastic.failures import EXPIRY, Strike, exclusion, nodes_to_exclude, strikes

NODES = ("n1", "n2", "n3", "n4")


@pytest.mark.parametrize(
    ("event", "found"),
    [
        ({"event": "node_check_failed", "node": "n2", "nodes": ["n2"], "why": "no fan"}, [Strike("n2", 7.0, 2)]),
        (
            {"event": "round_ended", "node": "n1", "nodes": ["n2"], "domain": "node", "outlook": "elsewhere"},
            [Strike("n2", 7.0, 1)],
        ),
        ({"event": "worker_hung", "node": "n2", "rank": 3}, [Strike("n2", 7.0, 1)]),
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
    assert nodes_to_exclude(found, NODES, 100.0, 2) == bad


def test_strikes_expire() -> None:
    found = [Strike("n1", 0.0, 2), Strike("n2", EXPIRY / 2, 2)]
    assert nodes_to_exclude(found, NODES, EXPIRY - 1, 2) == ("n2", "n1")
    assert nodes_to_exclude(found, NODES, EXPIRY + 1, 2) == ("n2",)
    assert nodes_to_exclude(found, NODES, 2 * EXPIRY, 2) == ()


def test_the_nodes_of_the_user_stay() -> None:
    assert exclusion(("n7", "n1"), {"n1"}, ("n2",)) == ("n7", "n2")
    assert exclusion(("n7",), (), ("n7",)) == ("n7",)
    assert exclusion(("n1",), {"n1"}, ()) == ()
