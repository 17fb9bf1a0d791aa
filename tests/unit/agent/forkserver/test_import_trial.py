"""In how many processes modules that do harm are found."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from slurm_elastic.agent.forkserver._imports import ImportTrial

PACKAGE = ["wide", *(f"wide.part{number}" for number in range(200))]


@pytest.mark.parametrize(
    ("harmful", "processes"),
    # The package as a whole, then each module; its parts need none if the package itself does harm.
    [([], 1), (["wide.part77"], 202), (PACKAGE, 2)],
)
def test_modules_that_do_harm_are_left_out(monkeypatch: pytest.MonkeyPatch, harmful: list[str], processes: int) -> None:
    tries, imported, harm = [], [], "importing it starts a thread"

    def tried_apart(_trial: ImportTrial, modules: Sequence[str]) -> str:
        tries.append(modules)
        return harm if {*modules} & {*harmful} else ""

    monkeypatch.setattr(ImportTrial, "_tried_apart", tried_apart)
    monkeypatch.setattr(ImportTrial, "_import", lambda _trial, module: imported.append(module))
    trial = ImportTrial([], [], [])
    trial._try(PACKAGE)
    assert trial.left_out == dict.fromkeys(harmful, harm)
    assert imported == [module for module in PACKAGE if module not in harmful]
    assert len(tries) == processes
