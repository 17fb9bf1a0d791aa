"""Loops of a run: each detector, at the limit from which on it speaks, and with records that are damaged."""

from __future__ import annotations

from typing import Any

import pytest

from slurm_elastic.failures.history import find_loops, flapping_nodes, leader_changes, without_checkpoint

HOUR = 3600.0
Record = tuple[float, dict[str, Any]]


def formed(at: float, *nodes: str) -> Record:
    return at, {"event": "round_formed", "nodes": list(nodes)}


def ended(at: float, reason: str = "worker_failed") -> Record:
    return at, {"event": "round_ended", "reason": reason}


def saved(at: float, checkpoint: int | None, step: int = 0) -> Record:
    return at, {"event": "progress", "checkpoint": checkpoint, "step": step}


def failing(rounds: int, reason: str = "worker_failed", *, checkpoint: int | None, step: int = 9) -> list[Record]:
    found = []
    for number in range(rounds):
        at = 1000.0 * number
        found += [formed(at, "n1"), saved(at + 10, checkpoint, step), ended(at + 20, reason)]
    return found


@pytest.mark.parametrize(
    ("history", "text"),
    [
        (failing(5, checkpoint=40), "no new checkpoint after step 40 in 5 rounds that failures or losses have ended"),
        (failing(5, "node_lost", checkpoint=40), "no new checkpoint after step 40 in 5 rounds"),
        (failing(4, checkpoint=40), ""),
        # Planned changes are no loop.
        (failing(9, "node_joined", checkpoint=40), ""),
        # Without checkpoints, steps tell; without either, nothing does.
        (failing(5, checkpoint=None), "no new step after 9 in 5 rounds"),
        ([each for each in failing(9, checkpoint=None) if each[1]["event"] != "progress"], ""),
        # It gets on in the last one.
        ([*failing(5, checkpoint=40), formed(9000, "n1"), saved(9010, 41)], ""),
    ],
)
def test_rounds_without_a_checkpoint(history: list[Record], text: str) -> None:
    found = without_checkpoint(history, 10_000.0)
    assert (found[0].text if found else "")[: len(text) or None] == text
    assert all(each.advice for each in found)


@pytest.mark.parametrize(
    ("hours", "text"),
    [
        (1.9, ""),
        (4.5, "no new checkpoint after step 20 in 4.5 h of training; before, one came within 1.0 h"),
    ],
)
def test_hours_without_a_checkpoint(hours: float, text: str) -> None:
    history = [formed(0, "n1"), saved(HOUR, 10), saved(2 * HOUR, 20)]
    now = (2 + hours) * HOUR
    assert [each.text for each in without_checkpoint(history, now)] == ([text] if text else [])
    # While it waits for nodes, it need not save.
    assert without_checkpoint([*history, ended(2.1 * HOUR, "requeued")], now) == ()
    # Of a run that saves twice a day four hours are not long.
    rare = [formed(0, "n1"), saved(HOUR, 10), saved(13 * HOUR, 20)]
    assert without_checkpoint(rare, 18 * HOUR) == ()


@pytest.mark.parametrize(
    ("times", "kind", "found"),
    [(4, "node_lost", ["n2"]), (4, "node_check_failed", ["n2"]), (3, "node_lost", []), (4, "node_left", [])],
)
def test_a_node_that_is_lost_again_and_again(times: int, kind: str, found: list[str]) -> None:
    history = [formed(0, "n1", "n2")]
    for number in range(times):
        at = 100.0 * number + 10
        history += [(at, {"event": kind, "nodes": ["n2"]}), formed(at + 1, "n1"), formed(at + 50, "n1", "n2")]
    loops = flapping_nodes(history, 1000.0)
    assert [each.nodes for each in loops] == [(node,) for node in found]
    assert flapping_nodes(history, 7 * HOUR) == ()
    if loops:
        assert loops[0].text == "n2 was lost and has joined again 4 times in 6 h"
        assert "--exclude=n2" in loops[0].advice


@pytest.mark.parametrize(("times", "lost", "found"), [(4, ["n2"], 1), (3, ["n2"], 0), (9, [], 0)])
def test_leaders_that_change_too_often(times: int, lost: list[str], found: int) -> None:
    history = [(100.0 * number, {"event": "leader_changed", "nodes": lost}) for number in range(times)]
    loops = leader_changes(history, 1000.0)
    assert len(loops) == found
    assert all(each.text == "the leader has changed 4 times in an hour; lost on n2" for each in loops)
    assert leader_changes(history, 2 * HOUR) == ()


def test_damaged_records_are_passed_over() -> None:
    damaged: list[Record] = [
        (1.0, {}),
        (2.0, {"event": "node_lost", "nodes": 3}),
        (3.0, {"event": "node_lost", "nodes": [3, None]}),
        (4.0, {"event": "round_formed", "nodes": {}}),
        (5.0, {"event": "progress", "checkpoint": "x", "step": True}),
        (6.0, {"event": "workers_ended", "workers": [1, {"checkpoint": 1.5}]}),
        (7.0, {"event": "leader_changed", "nodes": "n1"}),
        (8.0, {"event": ["round_ended"]}),
    ]
    assert find_loops(damaged * 9, 100.0) == ()
    # In any order, with all of them.
    assert [each.loop for each in find_loops([*damaged, *failing(5, checkpoint=3)][::-1], 10_000.0)] == [
        "no_checkpoint"
    ]


def test_a_loop_has_one_name_for_as_long_as_it_goes_on() -> None:
    (first,) = find_loops(failing(5, checkpoint=3), 10_000.0)
    (later,) = find_loops(failing(7, checkpoint=3), 12_000.0)
    assert first.key == later.key == "no_checkpoint.0"
