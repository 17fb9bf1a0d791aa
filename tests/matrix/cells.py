"""Cells of the matrix, what came of them, and the table in docs/versions.md; nothing is run here."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from enum import Enum

TORCH = ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
PYTHON = ("3.10", "3.11", "3.12", "3.13", "3.14")
SLURM = ("22.05", "24.11", "26.05")
COMMON_PYTHON = "3.11"
"""The Python of the test cluster's machines: Debian 12's."""
COMMON_TORCH = "2.13.0"
NEWEST_TORCH = TORCH[-1]
ANY_TORCH = "any"
"""In place of a release: whatever pip installs where it is asked for torch and slurm_elastic alone, without numpy."""


class Layer(Enum):
    """A layer of tests."""

    UNIT = "unit"
    LOCAL = "local"
    CLUSTER = "cluster"
    FRESH = "fresh"
    """Jobs of the cluster layer, in an environment that holds torch, slurm_elastic and nothing else."""
    FRESH_UNIT = "fresh-unit"
    FRESH_LOCAL = "fresh-local"
    """The layers without Slurm in that environment, with pytest: tests that need another package are skipped."""

    @property
    def tests(self) -> str:
        """The directory or file of its tests."""
        return (
            "tests/cluster/test_node_loss.py" if self is Layer.FRESH else f"tests/{self.value.removeprefix('fresh-')}"
        )


class Outcome(Enum):
    """What came of a layer in a cell."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_AVAILABLE = "not available"


@dataclass(frozen=True, slots=True)
class Cell:
    """One environment; `slurm` is empty where only the layers without Slurm are run."""

    torch: str
    python: str
    slurm: str = ""

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The layers that are run in it."""
        if self.torch == ANY_TORCH:
            return (Layer.FRESH, Layer.FRESH_UNIT, Layer.FRESH_LOCAL)
        return (Layer.CLUSTER,) if self.slurm else (Layer.UNIT, Layer.LOCAL)


@dataclass(frozen=True, slots=True)
class Result:
    """What came of one layer in one cell.

    Attributes:
        reason: Why it is not available; empty otherwise.
        tests: How many tests ran, without those that were skipped.
        failed: How many of them failed.
        date: Of the run, such as 2026-11-22.
        commit: Of the checkout, with ``+`` where it had changes.
    """

    torch: str
    python: str
    slurm: str
    layer: str
    outcome: str
    reason: str
    tests: int
    failed: int
    date: str
    commit: str

    @property
    def key(self) -> tuple[tuple[int, ...], tuple[int, ...], str, str]:
        """Its place in the file."""
        return (_numbers(self.torch), _numbers(self.python), self.slurm, self.layer)


def cells(environ: Mapping[str, str]) -> tuple[Cell, ...]:
    """Return the cells to run: the whole plan, or one cell where TORCH, PYTHON or SLURM names it."""
    torch, python, slurm = (environ.get(name, "") for name in ("TORCH", "PYTHON", "SLURM"))
    if torch == ANY_TORCH:
        return (Cell(torch, python or COMMON_PYTHON, slurm or SLURM[-1]),)
    if torch or python or slurm:
        torch, python = torch or NEWEST_TORCH, python or COMMON_PYTHON
        return (Cell(torch, python), *((Cell(torch, python, slurm),) if slurm else ()))
    plan = [
        *(Cell(torch, COMMON_PYTHON) for torch in TORCH),
        *(Cell(NEWEST_TORCH, python) for python in PYTHON),
        # The newest torch with wheels for it.
        Cell("2.14.1", "3.10"),
        *(Cell(torch, COMMON_PYTHON, slurm) for torch in (COMMON_TORCH, NEWEST_TORCH) for slurm in SLURM),
        Cell(ANY_TORCH, COMMON_PYTHON, SLURM[-1]),
    ]
    return tuple(dict.fromkeys(plan))


def recorded(results: Iterable[Result], new: Result) -> tuple[Result, ...]:
    """Return the results with a new one, in the place of the last one of its layer and cell."""
    kept = {result.key: result for result in (*results, new)}
    return tuple(kept[key] for key in sorted(kept))


def dumped(results: Iterable[Result]) -> str:
    """Return the content of the file of results: one line each, so that a change is one line of a diff."""
    return "[\n" + ",\n".join(json.dumps(asdict(result)) for result in results) + "\n]\n"


def loaded(text: str) -> tuple[Result, ...]:
    """Return the results in a file of results."""
    return tuple(Result(**fields) for fields in json.loads(text))


def table(results: Iterable[Result]) -> str:
    """Return the table of all cells that the plan or the results name, and what came of fresh environments."""
    results = tuple(results)
    fresh = {(result.slurm, result.layer): result for result in results if result.layer.startswith(Layer.FRESH.value)}
    results = tuple(result for result in results if result not in fresh.values())
    found = {(result.torch, result.python, result.slurm, result.layer): result for result in results}
    rows = {(cell.torch, cell.python) for cell in cells({}) if cell.torch != ANY_TORCH} | {key[:2] for key in found}
    columns = [("", Layer.UNIT), ("", Layer.LOCAL), *((slurm, Layer.CLUSTER) for slurm in SLURM)]
    titles = ["torch", "Python", *(f"{layer.value}{slurm and f', Slurm {slurm}'}" for slurm, layer in columns)]
    lines = [_row(titles), _row(["---"] * len(titles))]
    for torch, python in sorted(rows, key=lambda row: (_numbers(row[0]), _numbers(row[1]))):
        shown = [_shown(found.get((torch, python, slurm, layer.value))) for slurm, layer in columns]
        lines.append(_row([torch, python, *shown]))
    releases = sorted({SLURM[-1], *(slurm for slurm, _ in fresh if slurm)})
    names = {
        **{(slurm, Layer.FRESH.value): f"Jobs on Slurm {slurm}" for slurm in releases},
        ("", Layer.FRESH_UNIT.value): "Unit tests",
        ("", Layer.FRESH_LOCAL.value): "Local tests",
    }
    for key, name in names.items():
        which = f", with torch {fresh[key].torch} and Python {fresh[key].python}" if key in fresh else ""
        lines += ["", f"{name} after `pip install torch slurm_elastic` alone: {_shown(fresh.get(key))}{which}"]
    return "\n".join(lines) + "\n"


def _shown(result: Result | None) -> str:
    if result is None:
        return "not run"
    if result.outcome == Outcome.NOT_AVAILABLE.value:
        return f"not available: {result.reason}"
    if result.outcome == Outcome.PASSED.value:
        return f"{result.tests:,} passed, {result.date}"
    return f"**{result.reason or f'{result.failed:,} of {result.tests:,} failed'}**, {result.date}"


def _row(values: Iterable[str]) -> str:
    return f"| {' | '.join(values)} |"


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(int(number) for number in release.split("."))
