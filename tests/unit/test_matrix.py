"""The table of releases in docs/versions.md."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from slurm_elastic.agent.workers.torch_hooks import NEWEST, release_numbers
from slurm_elastic.slurm import NEWEST_RELEASE, OLDEST_RELEASE
from tests.matrix.cells import NEWEST_TORCH, SLURM, Cell, Layer, Outcome, cells, dumped, loaded, recorded, table

DOCS = Path(__file__).parents[2] / "docs"


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


def test_the_page_has_the_table_of_the_results() -> None:
    results = loaded((DOCS / "versions.json").read_text())
    assert table(results) in (DOCS / "versions.md").read_text()
    # What did not pass is never shown as passed; a new result takes the place of the last one.
    failed = replace(results[0], outcome=Outcome.FAILED.value, failed=3)
    assert f"**3 of {failed.tests:,} failed**" in table(recorded(results, failed))
    assert recorded(recorded(results, failed), results[0]) == results == loaded(dumped(results))
