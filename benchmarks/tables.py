"""Results as tables: shown as plain text, kept as JSON, and turned into Markdown by :mod:`benchmarks.report`."""

from __future__ import annotations

import json
import platform
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path

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
        cells = [self.columns, *([_shown(cell) for cell in row] for row in self.rows)]
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
        content = json.loads(path.read_text())
        return cls(
            content["benchmark"],
            content["command"],
            content["machine"],
            [Table(**table) for table in content["tables"]],
            [Bar(**bar) for bar in content["bars"]],
        )


def median(values: Iterable[float | None]) -> float | None:
    """The median, where None stands for something that never happened; None if that is the median."""
    ordered = sorted(float("inf") if value is None else value for value in values)
    if not ordered:
        return None
    middle = statistics.median(ordered)
    return None if middle in (float("inf"), float("nan")) or middle != middle else middle


def seconds(value: float | None, digits: int = 2) -> str:
    """A time for a table."""
    return "never" if value is None else f"{value:.{digits}f}"


def _shown(cell: Cell) -> str:
    return "" if cell is None else str(cell)


def _machine() -> str:
    model = next(
        (line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), ""
    )
    memory = next((int(line.split()[1]) >> 20 for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), 0)
    cores = sum(line.startswith("processor") for line in _lines("/proc/cpuinfo"))
    return (
        f"{cores} cores ({model or platform.machine()}), {memory} GiB, Linux {platform.release()}, "
        f"Python {platform.python_version()}, torch {version('torch')}"
    )


def _lines(path: str) -> Sequence[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
