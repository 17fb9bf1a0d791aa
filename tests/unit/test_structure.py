"""The map of docs/architecture.md against the tree: every package is there, and imports only what is below it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import slurm_elastic

PACKAGE = Path(slurm_elastic.__file__).parent
ARCHITECTURE = Path(__file__).parents[2] / "docs" / "architecture.md"
PURE = {"__future__", "bisect", "collections", "dataclasses", "enum", "functools", "itertools", "math", "re", "types"}
PURE |= {"typing", "zlib"}
"""Modules of the standard library that neither act nor look at anything."""


def mapped() -> list[str]:
    """What the table of packages names, from the top down."""
    table = ARCHITECTURE.read_text().partition("| package | subject |")[2].partition("\n\n")[0]
    return re.findall(r"^\| `(\w+)` \|", table, flags=re.MULTILINE)


def imports(path: Path) -> Iterator[str]:
    """The modules that a file imports, at its top or anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module == "slurm_elastic":
            yield from (f"slurm_elastic.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            yield node.module or ""


def test_the_map_has_every_package() -> None:
    there = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    assert {name for name in there if not name.startswith("_")} == set(mapped())


def test_arrows_run_downwards_only() -> None:
    order = mapped()
    wrong = [
        f"{path.relative_to(PACKAGE)} imports {module}"
        for above in order
        for path in ((PACKAGE / above).rglob("*.py") if (PACKAGE / above).is_dir() else [PACKAGE / f"{above}.py"])
        for module in imports(path)
        if module.startswith("slurm_elastic.")
        and (below := module.split(".")[1]) in order
        and order.index(below) < order.index(above)
    ]
    assert wrong == []


def test_modules_with_an_underscore_are_imported_in_their_own_package_only() -> None:
    wrong = [
        f"{path.relative_to(PACKAGE)} imports {module}"
        for path in PACKAGE.rglob("*.py")
        for module in imports(path)
        if (private := re.match(r"(slurm_elastic\..+?)\._[a-z]", module))
        and PACKAGE.parent.joinpath(*private[1].split(".")) not in path.parents
    ]
    assert wrong == []


def test_the_membership_machine_imports_nothing_of_the_project_and_nothing_that_acts() -> None:
    own = "slurm_elastic.rendezvous.membership"
    foreign = {
        module
        for path in (PACKAGE / "rendezvous" / "membership").glob("*.py")
        for module in imports(path)
        if module.partition(".")[0] not in PURE and not f"{module}.".startswith(f"{own}.")
    }
    assert foreign == set()


def test_an_agent_knows_of_snapshots_by_its_feature_alone() -> None:
    knows = {
        path.name
        for path in (PACKAGE / "agent").rglob("*.py")
        if any(module.startswith("slurm_elastic.snapshot") for module in imports(path))
    }
    assert knows == {"snapshot_feature.py"}


@pytest.mark.parametrize(
    "name", ["lifecycle.machine", "lifecycle.states", "lifecycle.events", "lifecycle.actions", "job.job_end"]
)
def test_what_an_agent_decides_imports_nothing_that_acts(name: str) -> None:
    # Their values come from these packages; signal is there for the names of signals.
    own = "slurm_elastic.agent.lifecycle"
    values = {"slurm_elastic.errors", own, *(f"{own}.{module}" for module in ("states", "events", "actions"))}
    rendezvous = (
        "election",
        "membership",
        *(f"membership.{module}" for module in ("agents", "events", "planned_stop")),
    )
    values |= {f"slurm_elastic.rendezvous.{module}" for module in (*rendezvous, "transport.messages")}
    values |= {"slurm_elastic.slurm", "signal"}
    imported = set(imports(PACKAGE.joinpath("agent", *name.split(".")).with_suffix(".py")))
    assert {module for module in imported - values if module.partition(".")[0] not in PURE} == set()
    torch = f"import sys, slurm_elastic.agent.{name}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", torch], timeout=60).returncode == 0


def test_frameworks_are_imported_by_their_integration_alone() -> None:
    own = {"accelerate", "lightning", "pytorch_lightning", "transformers"}
    wrong = [
        f"{path.relative_to(PACKAGE)} imports {module}"
        for path in PACKAGE.rglob("*.py")
        for module in imports(path)
        if (module.partition(".")[0] in own and path.parent.name != "integrations")
        or (module.startswith("slurm_elastic.integrations") and path.parent.name != "integrations")
    ]
    assert wrong == []


def test_the_election_is_decided_in_modules_that_neither_act_nor_look_at_anything() -> None:
    shells = {"__init__", "runner"}
    acting = {
        (path.stem, module)
        for path in (PACKAGE / "rendezvous" / "election").glob("*.py")
        if path.stem not in shells
        for module in imports(path)
        if module.partition(".")[0] not in PURE | {"slurm_elastic"}
        or any(module == f"slurm_elastic.rendezvous.election.{shell}" for shell in shells)
    }
    assert acting == set()
