"""Which rank is named when a worker hangs."""

from __future__ import annotations

import pytest

from slurm_elastic.rendezvous.membership.stragglers import Collective, WorkerPosition, find_stragglers


@pytest.mark.parametrize(
    ("steps", "text"),
    [
        ({}, ""),
        ({0: 5}, ""),
        ({0: 5, 2: 5, 4: 5}, "no worker is behind: 5 steps in this round everywhere"),
        ({0: 5, 2: 4, 4: 5}, "rank 2 is behind: 4 steps in this round, others 5"),
        ({4: 4, 0: 5, 2: 4}, "ranks 2, 4 are behind: 4 steps in this round, others 5"),
        (
            {**dict.fromkeys(range(10), 1), 10: 3},
            "ranks 0, 1, 2, 3, 4, 5, 6, 7, ... are behind: 1 steps in this round, others 3",
        ),
    ],
)
def test_those_with_the_fewest_steps_are_behind(steps: dict[int, int], text: str) -> None:
    assert find_stragglers([WorkerPosition(rank, taken) for rank, taken in steps.items()]).text == text


@pytest.mark.parametrize(
    ("positions", "text"),
    [
        (
            [WorkerPosition(0, 5, True, "train.py:7 in step"), WorkerPosition(1, 5, False, "train.py:9 in load")],
            "rank 1 is not in the collective that others wait in, after 5 steps; at train.py:9 in load",
        ),
        (
            [
                WorkerPosition(0, 5, True),
                WorkerPosition(1, 5, False, "a.py:1 in f"),
                WorkerPosition(2, 5, False, "b.py:2 in g"),
            ],
            "ranks 1, 2 are not in the collective that others wait in, after 5 steps; at a.py:1 in f, b.py:2 in g",
        ),
        # A rank that nobody waits for may do anything.
        (
            [WorkerPosition(0, 5, False), WorkerPosition(1, 5, False)],
            "no worker is behind: 5 steps in this round everywhere",
        ),
        (
            [WorkerPosition(0, 5, True), WorkerPosition(1, 5, None)],
            "no worker is behind: 5 steps in this round everywhere",
        ),
        (
            [WorkerPosition(0, 5, False, "x.py:1 in f"), WorkerPosition(1, 4, True, "train.py:9 in load")],
            "rank 1 is behind: 4 steps in this round, others 5; at train.py:9 in load",
        ),
    ],
)
def test_who_does_not_come_to_a_collective_is_named_with_its_place(positions: list[WorkerPosition], text: str) -> None:
    assert find_stragglers(positions).text == text


def at(
    rank: int, number: int, name: str = "all_reduce", *, here: bool | None = None, place: str = ""
) -> WorkerPosition:
    return WorkerPosition(rank, 5, here, place, (Collective("0", number, name),))


def in_two_groups(rank: int, pair: int, all_: int) -> WorkerPosition:
    groups = (Collective("pair", pair, "send"), Collective("all", all_, "all_gather"))
    return WorkerPosition(rank, 5, True, collectives=groups)


@pytest.mark.parametrize(
    ("positions", "ranks", "text"),
    [
        (
            [at(0, 7, here=True), at(1, 6, here=False, place="train.py:9 in load")],
            (1,),
            "rank 1 is not in the collective that others wait in (all_reduce, number 7), after 5 steps; "
            "at train.py:9 in load",
        ),
        # On GPUs no stack tells, and ranks begin several collectives ahead.
        (
            [at(0, 9), at(1, 7), at(2, 8)],
            (1,),
            "rank 1 is not in the collective that others wait in (all_reduce, number 8), after 5 steps",
        ),
        # Its process has ended in the collective: its stack is that of the end.
        (
            [at(0, 7, here=False), at(1, 6, "broadcast", here=False)],
            (1,),
            "rank 1 is not in the collective that others wait in (all_reduce, number 7), after 5 steps",
        ),
        # Rank 1 is behind in one group because it waits for rank 2 in another one.
        (
            [
                in_two_groups(0, 3, 5),
                in_two_groups(1, 4, 4),
                WorkerPosition(2, 5, False, "a.py:1 in f", (Collective("pair", 3, "send"),)),
            ],
            (2,),
            "rank 2 is not in the collective that others wait in (send, number 4), after 5 steps; at a.py:1 in f",
        ),
        (
            [
                at(0, 7, here=True, place="train.py:9 in step"),
                at(1, 7, "broadcast", here=True, place="train.py:5 in f"),
            ],
            (),
            "rank 1 is in broadcast, and others in all_reduce, both number 7 of their process group: the script calls "
            "different collectives; at train.py:5 in f, train.py:9 in step",
        ),
        # It has gone on from another one, and is elsewhere.
        (
            [at(0, 7, here=True), at(1, 7, "broadcast", here=False)],
            (1,),
            "rank 1 is not in the collective that others wait in, after 5 steps",
        ),
        ([at(0, 7), at(1, 7)], (), "no worker is behind: 5 steps in this round everywhere"),
        (
            [WorkerPosition(0, 6, True, collectives=at(0, 7).collectives), at(1, 6, here=False)],
            (1,),
            "rank 1 is behind: 5 steps in this round, others 6; they wait in a collective (all_reduce, number 7)",
        ),
    ],
)
def test_the_flight_recorder_tells_who_does_not_come(
    positions: list[WorkerPosition], ranks: tuple[int, ...], text: str
) -> None:
    for order in (positions, positions[::-1]):
        found = find_stragglers(order)
        assert (found.ranks, found.text) == (ranks, text)
