"""Any number of simulated schedules of all kinds, on all cores.

    python3 -m tests.simulation --schedules 1000000 --first 0
    python3 -m tests.simulation --mutations

Six in ten have several possible leaders, most of these with one thing that happens to the leader at one message, in
some while a worker fails; three in ten have one leader and all that can happen to its members; one in ten lets the
workers of a round stop at one step.
Ends with 1 at the first schedule that breaks a promise, which is printed with the command that repeats it.

With --mutations the product has one mistake after the other, and the table in docs/testing.md is written anew: in how
many schedules each is found. Ends with 1 if one is not found.
"""

from __future__ import annotations

import argparse
import sys
import time

from tests.simulation import mutation_table
from tests.simulation.schedules import PER_SCRIPT, play_all

SHARES = {"strikes": 0.38, "failures": 0.02, "leaders": 0.2, "membership": 0.3, "stop": 0.1}


def main() -> int:
    """Play them."""
    parser = argparse.ArgumentParser(
        prog="tests.simulation", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--schedules", type=int, help="how many, about (default: 100000; 1000 for each mistake with --mutations)"
    )
    parser.add_argument("--first", type=int, default=0, help="the first seed of every kind (default: 0)")
    parser.add_argument(
        "--mutations", nargs="*", metavar="NAME", help="write the table of mistakes in docs/testing.md, or rows of it"
    )
    arguments = parser.parse_args()
    if arguments.schedules is None:
        arguments.schedules = 100_000 if arguments.mutations is None else 1000
    if arguments.schedules < 1 or arguments.first < 0:
        parser.error("--schedules has to be at least 1, and --first at least 0")
    if arguments.mutations is not None:
        known = mutation_table.MUTATIONS
        unknown = [name for name in arguments.mutations if name not in known]
        if unknown:
            parser.error(f"no mistake is called {unknown[0]!r}; there are {', '.join(known)}")
        return _count_mutations(arguments.mutations or [*known], arguments.schedules)
    progress = Progress(arguments.schedules)
    for kind, share in SHARES.items():
        count = -(-int(arguments.schedules * share) // (PER_SCRIPT if kind in ("strikes", "failures") else 1))
        result = play_all(kind, range(arguments.first, arguments.first + count), progress.add)
        if result.failure:
            print(f"\n{kind}: {result.failure}")
            return 1
    progress.end()
    return 0


def _count_mutations(names: list[str], schedules: int) -> int:
    rows = []
    for row in mutation_table.count(names, schedules):
        print(row, flush=True)
        rows.append(row)
    mutation_table.write(rows, schedules)
    # A mistake that only crashes shows nothing.
    return 0 if all(row.found and "crashes" not in "".join(row.promises) for row in rows) else 1


class Progress:
    """A line that says how far it is, rewritten on a terminal and added to elsewhere."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._began = self._told = time.monotonic()
        self._played = 0

    def add(self, played: int) -> None:
        """So many more are done."""
        self._played += played
        now = time.monotonic()
        if now >= self._told + (0.5 if sys.stdout.isatty() else 10.0):
            self._told = now
            seconds = now - self._began
            left = max(0.0, self._total / self._played - 1) * seconds
            print(
                f"{self._played:,} of about {self._total:,} schedules in {seconds:.0f} s, about {left:.0f} s left",
                end="\r" if sys.stdout.isatty() else "\n",
                flush=True,
            )

    def end(self) -> None:
        """All are done."""
        print(f"{self._played:,} schedules in {time.monotonic() - self._began:.0f} s, no promise broken{' ' * 20}")


if __name__ == "__main__":
    sys.exit(main())
