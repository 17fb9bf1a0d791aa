"""In how many processes modules that do harm are found."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from slurm_elastic.agent.forkserver._imports import ImportTrial

PACKAGE = ["wide", *(f"wide.part{number}" for number in range(200))]


@pytest.mark.parametrize(
    ("harmful", "left_out", "most"),
    [
        (["wide.part77"], ["wide.part77"], 17),
        # What imports a package imports its parent.
        (PACKAGE, PACKAGE, 9),
        ([], [], 2),
    ],
)
def test_few_processes_find_harm_among_many_modules(
    monkeypatch: pytest.MonkeyPatch, harmful: list[str], left_out: list[str], most: int
) -> None:
    tries, imported = [], []

    def tried_apart(_trial: ImportTrial, modules: Sequence[str]) -> str:
        tries.append(modules)
        return "importing it starts a thread" if {*modules} & {*harmful} else ""

    def import_here(_trial: ImportTrial, module: str) -> None:
        imported.append(module)

    monkeypatch.setattr(ImportTrial, "_tried_apart", tried_apart)
    monkeypatch.setattr(ImportTrial, "_import", import_here)
    trial = ImportTrial([], [], [], lambda: None)
    trial._halve(PACKAGE)
    assert trial.left_out == dict.fromkeys(left_out, "importing it starts a thread")
    assert imported == [module for module in PACKAGE if module not in left_out]
    assert len(tries) <= most
