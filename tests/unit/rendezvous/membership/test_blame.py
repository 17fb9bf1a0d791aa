"""Which rank is named when a worker hangs: the cases of stragglers.txt."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from slurm_elastic.rendezvous.membership.stragglers import Collective, WorkerPosition, find_stragglers

TEXT = Path(__file__).with_name("stragglers.txt").read_text()
CASES = {case.partition("\n")[0]: case.splitlines()[1:] for case in TEXT.removeprefix("=== ").split("\n=== ")}


def position(line: str) -> WorkerPosition:
    """The rank and its steps; whether it waits in a collective; its last one in each group; its line of the script."""
    rank, steps, *more = line.replace(": ", ", ", 1).split(", ")
    known = WorkerPosition(int(rank), int(steps.removesuffix(" steps")))
    for each in more:
        match each.split(" "):
            case ["waits" | "elsewhere"]:
                known = replace(known, in_collective=each == "waits")
            case ["at", *place]:
                known = replace(known, place=" ".join(place))
            case [group, operation, number]:
                known = replace(known, collectives=(*known.collectives, Collective(group, int(number), operation)))
    return known


@pytest.mark.parametrize("lines", CASES.values(), ids=CASES)
def test_the_rank_that_the_others_wait_for_is_named(lines: list[str]) -> None:
    *positions, expected = lines
    for order in (positions, positions[::-1]):
        found = find_stragglers([*map(position, order)])
        assert f"=> {' '.join(map(str, found.ranks))}: {found.text}" == expected
