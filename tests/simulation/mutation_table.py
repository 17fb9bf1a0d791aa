"""The table of mistakes in docs/testing.md: in how many schedules the simulation finds each, and by which promise."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.simulation import snapshots, test_snapshots
from tests.simulation.mutations import MUTATIONS, Mutation
from tests.simulation.violation import Violation

PAGE = Path(__file__).resolve().parents[2] / "docs" / "testing.md"
_HEADER = ("| mistake | found in, of {schedules:,} | first by | broken promises |", "|---|---|---|---|")
_START = "| mistake | found in, of "


@dataclass(frozen=True)
class Row:
    """What the schedules with one mistake came to.

    Attributes:
        mistake: what is broken.
        found: how many schedules broke a promise.
        first: number of the first of them, from 1; 0 if none did.
        promises: those that were broken, the most frequent first.
        rare: see :class:`~tests.simulation.mutations.Mutation`.
    """

    mistake: str
    found: int
    first: int
    promises: tuple[str, ...]
    rare: bool = False

    def __str__(self) -> str:
        return f"| {self.mistake} | {self.found}{'*' * self.rare} | {self.first} | {', '.join(self.promises)} |"


def mistakes() -> dict[str, Mutation]:
    """Return all mistakes by name: of the election, the membership, the stop step and the snapshots."""
    # pytest has the list of those that its test plays.
    (parameters,) = (mark for mark in test_snapshots.test_a_mistake_is_found.pytestmark if mark.name == "parametrize")  # type: ignore[attr-defined]
    found = {}
    for make, promise in parameters.args[1]:
        what = "snapshots: " + make.__name__.strip("_").replace("_", " ")
        found[make.__name__] = Mutation(what, (promise,), make, _snapshots)
    return MUTATIONS | found


def _snapshots(number: int) -> Violation | None:
    try:
        snapshots.play(number)
    except snapshots.ViolationError as error:
        promise, _, detail = str(error).partition(": ")
        # Without a colon the first words are names.
        return Violation(promise if detail else "overwritten", detail or promise)
    return None


def _row(name: str, schedules: int) -> Row:
    mutation = mistakes()[name]
    promises = Counter[str]()
    first = 0
    for number, violation in enumerate(mutation.violations(schedules), 1):
        if violation is not None:
            promises[violation.promise] += 1
            first = first or number
    ordered = tuple(promise for promise, _ in promises.most_common())
    return Row(mutation.what, promises.total(), first, ordered, mutation.rare)


def count(names: Iterable[str], schedules: int) -> Iterator[Row]:
    """Play `schedules` schedules with each of these mistakes, on all cores."""
    context = multiprocessing.get_context("fork")
    with concurrent.futures.ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=context) as pool:
        rows = [pool.submit(_row, name, schedules) for name in names]
        for row in rows:
            yield row.result()


def write(rows: Iterable[Row], schedules: int, page: Path = PAGE) -> None:
    """Put rows into the table of the page; those of other mistakes stay."""
    lines = page.read_text().splitlines()
    begins = next(number for number, line in enumerate(lines) if line.startswith(_START))
    ends = next(number for number in range(begins, len(lines)) if not lines[number].startswith("|"))
    known = {line.split(" | ")[0].removeprefix("| "): line for line in lines[begins + 2 : ends]}
    known |= {row.mistake: str(row) for row in rows}
    table = [known[each.what] for each in mistakes().values() if each.what in known]
    header = [_HEADER[0].format(schedules=schedules), _HEADER[1]]
    page.write_text("\n".join([*lines[:begins], *header, *table, *lines[ends:]]) + "\n")
