"""The table of releases in docs/versions.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_elastic.agent.workers.torch_hooks import NEWEST, release_numbers
from slurm_elastic.slurm import NEWEST_RELEASE, OLDEST_RELEASE
from tests.matrix.cells import (
    NEWEST_TORCH,
    SLURM,
    Cell,
    Layer,
    Outcome,
    Result,
    cells,
    dumped,
    loaded,
    recorded,
    table,
)

DOCS = Path(__file__).parents[2] / "docs"


def _result(layer: str = "unit", *, slurm: str = "", tests: int = 1200, failed: int = 0) -> Result:
    outcome = Outcome.FAILED if failed else Outcome.PASSED
    return Result("2.15.0", "3.11", slurm, layer, outcome.value, "", tests, failed, "2026-11-22", "abc")


def test_the_plan_has_every_release_and_a_variable_asks_for_one_cell() -> None:
    plan = cells({})
    assert {cell.torch for cell in plan} == {"2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0", "any"}
    assert {cell.python for cell in plan} == {"3.10", "3.11", "3.12", "3.13", "3.14"}
    assert {cell.slurm for cell in plan} == {"", "22.05", "24.11", "26.05"}
    assert len(plan) == len(set(plan))
    # `slurm-elastic doctor` says of others that they were not tested.
    assert release_numbers(NEWEST_TORCH)[:2] == release_numbers(NEWEST)
    assert [f"{year}.{month:02d}" for year, month in (OLDEST_RELEASE, NEWEST_RELEASE)] == [SLURM[0], SLURM[-1]]
    assert cells({"PYTHON": "3.13"}) == (Cell("2.15.0", "3.13"),)
    assert cells({"TORCH": "2.14.0", "SLURM": "26.05"}) == (Cell("2.14.0", "3.11"), Cell("2.14.0", "3.11", "26.05"))
    assert cells({"TORCH": "any"}) == (Cell("any", "3.11", "26.05"),)
    assert Cell("any", "3.11", "26.05").layers == (Layer.FRESH, Layer.FRESH_UNIT, Layer.FRESH_LOCAL)
    assert Cell("2.15.0", "3.11").layers == (Layer.UNIT, Layer.LOCAL)
    assert Cell("2.15.0", "3.11", "26.05").layers == (Layer.CLUSTER,)


def test_a_new_result_takes_the_place_of_the_last_one() -> None:
    old, other, new = _result(failed=3), _result("cluster", slurm="26.05"), _result()
    results = recorded(recorded(recorded((), old), other), new)
    assert set(results) == {new, other}
    assert loaded(dumped(results)) == results


@pytest.mark.parametrize(
    ("result", "shown"),
    [
        (_result(), "1,200 passed, 2026-11-22"),
        (_result(failed=3), "**3 of 1,200 failed**, 2026-11-22"),
        (
            Result("2.15.0", "3.11", "", "unit", "failed", "pytest did not run", 0, 0, "2026-11-22", "abc"),
            "**pytest did not run**, 2026-11-22",
        ),
        (
            Result("2.15.0", "3.11", "", "unit", "not available", "no Python 3.11", 0, 0, "2026-11-22", "abc"),
            "not available: no Python 3.11",
        ),
    ],
)
def test_what_did_not_pass_is_never_shown_as_passed(result: Result, shown: str) -> None:
    rows = [line.split(" | ") for line in table([result]).splitlines()]
    (row,) = [row for row in rows if row[:2] == ["| 2.15.0", "3.11"]]
    assert row[2:4] == [shown, "not run"]


def test_jobs_in_a_fresh_environment_have_a_line_of_their_own() -> None:
    after = "after `pip install torch slurm_elastic` alone:"
    lines = table([_result("fresh", slurm="26.05", tests=3), _result("fresh-local", tests=9)]).splitlines()
    assert lines[-5::2] == [
        f"Jobs on Slurm 26.05 {after} 3 passed, 2026-11-22, with torch 2.15.0 and Python 3.11",
        f"Unit tests {after} not run",
        f"Local tests {after} 9 passed, 2026-11-22, with torch 2.15.0 and Python 3.11",
    ]
    assert [line.rpartition(": ")[2] for line in table([]).splitlines()[-5::2]] == ["not run"] * 3
    assert table([]).splitlines()[:-6] == lines[:-6]


def test_the_page_has_the_table_of_the_results() -> None:
    assert table(loaded((DOCS / "versions.json").read_text())) in (DOCS / "versions.md").read_text()
