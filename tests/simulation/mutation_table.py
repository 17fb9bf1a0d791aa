"""The table of mistakes in docs/testing.md: in how many schedules the simulation finds each, and by which promise."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.simulation.snapshot_mutations import MUTATIONS

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


def _row(name: str, schedules: int) -> Row:
    mutation = MUTATIONS[name]
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
    before, known, behind = _taken_apart(page)
    known |= {row.mistake: str(row) for row in rows}
    table = [known[name] for name in MUTATIONS if name in known]
    header = [_HEADER[0].format(schedules=schedules), _HEADER[1]]
    page.write_text("\n".join([*before, *header, *table, *behind]) + "\n")


def in_docs(page: Path = PAGE) -> set[str]:
    """Return the mistakes in the table of the page."""
    return {*_taken_apart(page)[1]}


def _taken_apart(page: Path) -> tuple[list[str], dict[str, str], list[str]]:
    lines = page.read_text().splitlines()
    begins = next(number for number, line in enumerate(lines) if line.startswith(_START))
    ends = next(number for number in range(begins, len(lines)) if not lines[number].startswith("|"))
    known = {line.split(" | ")[0].removeprefix("| "): line for line in lines[begins + 2 : ends]}
    return lines[:begins], known, lines[ends:]
