"""Results as tables: shown as plain text, kept as JSON, and turned into Markdown by :mod:`benchmarks.report`."""

from __future__ import annotations

import json
import math
import os
import platform
import re
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path

import msgspec

Cell = str | int | None


@dataclass(slots=True)
class Table:
    """One table of results; `note` says what a reader has to know to believe it."""

    title: str
    columns: list[str]
    rows: list[list[Cell]] = field(default_factory=list)
    note: str = ""

    def text(self) -> str:
        """The table for a terminal, numbers to the right."""
        cells = [self.columns, *(["" if cell is None else str(cell) for cell in row] for row in self.rows)]
        widths = [max(len(row[column]) for row in cells) for column in range(len(self.columns))]
        lines = [
            "  ".join(
                cell.ljust(width) if column == 0 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in cells
        ]
        note = [self.note] if self.note else []
        return "\n".join([self.title, "", lines[0], "-" * len(lines[0]), *lines[1:], *note])


@dataclass(slots=True)
class Bar:
    """A promise and what was measured."""

    promise: str
    measured: str
    reached: bool

    @classmethod
    def at_most(cls, promise: str, value: float | None, limit: float, unit: str = "s") -> Bar:
        """A value that must not exceed `limit`; None if it could not be measured, which does not keep the promise."""
        if value is None:
            return cls(promise, "never", False)
        return cls(promise, f"{value:.3g} {unit}".strip(), value <= limit)

    @classmethod
    def at_least(cls, promise: str, value: float | None, limit: float, unit: str = "times") -> Bar:
        """A value that must reach `limit`."""
        if value is None:
            return cls(promise, "not measured", False)
        return cls(promise, f"{value:.3g} {unit}".strip(), value >= limit)


@dataclass(slots=True)
class Results:
    """Everything that one benchmark found out."""

    benchmark: str
    command: str = ""
    machine: str = ""
    tables: list[Table] = field(default_factory=list)
    bars: list[Bar] = field(default_factory=list)

    @classmethod
    def of(cls, benchmark: str) -> Results:
        """No results yet, from this machine and command line."""
        command = " ".join(["python", "-m", f"benchmarks.{benchmark}", *sys.argv[1:]])
        return cls(benchmark, command, _machine())

    def add(self, table: Table) -> None:
        """Keep a table and show it at once."""
        self.tables.append(table)
        print(f"\n{table.text()}", flush=True)

    def finish(self, destination: Path | None) -> int:
        """Show the promises, write JSON to `destination`, and return the exit code: 1 if a promise is not kept."""
        if self.bars:
            rows: list[list[Cell]] = [[bar.promise, bar.measured, "yes" if bar.reached else "NO"] for bar in self.bars]
            print(f"\n{Table('Promises', ['promise', 'measured', 'kept'], rows).text()}", flush=True)
        self.keep(destination)
        return 0 if all(bar.reached for bar in self.bars) else 1

    def keep(self, destination: Path | None) -> None:
        """Write what there is so far as JSON to `destination`."""
        if destination is not None:
            destination.parent.mkdir(parents=True, exist_ok=True)
            destination.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Results:
        """Read what :meth:`finish` wrote."""
        return msgspec.json.decode(path.read_bytes(), type=cls)


def median(values: Iterable[float | None]) -> float | None:
    """The median, where None stands for something that never happened; None if that is the median."""
    ordered = sorted(float("inf") if value is None else value for value in values)
    if not ordered:
        return None
    middle = statistics.median(ordered)
    return middle if math.isfinite(middle) else None


def longest(values: Sequence[float | None]) -> float | None:
    """The largest; None if something never happened."""
    return None if None in values else max(value for value in values if value is not None)


def seconds(value: float | None, digits: int = 2) -> str:
    """A time for a table."""
    return "never" if value is None else f"{value:.{digits}f}"


def _machine() -> str:
    processors = Path("/proc/cpuinfo").read_text()
    model = re.search(r"^model name\s*: (.*)", processors, re.MULTILINE)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 30
    return (
        f"{os.cpu_count()} cores ({model[1] if model else platform.machine()}), {memory} GiB, "
        f"Linux {platform.release()}, Python {platform.python_version()}, torch {version('torch')}"
    )
