"""The name of a list says for what it is valid."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from slurm_elastic.agent.forkserver._import_list import list_path


def test_each_environment_of_packages_has_a_list_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes may have different ones, and nodes with the same one share a list."""
    packages = tmp_path / "lib" / "site-packages"
    packages.mkdir(parents=True)

    def name(script: str = "train.py", path: tuple[str, ...] = (str(packages),)) -> str:
        return list_path("lists", ["-u", script], path)

    first = name()
    assert first == name()
    others = [name("other/train.py"), name(path=(str(packages), "more"))]
    with monkeypatch.context() as change:
        change.setattr(sys, "prefix", "another environment")
        others.append(name())
    with monkeypatch.context() as change:
        change.setattr(sys, "version", "3.99")
        others.append(name())
    (packages / "numpy-2.4.0.dist-info").mkdir()
    others.append(name())
    (packages / "numpy-2.4.0.dist-info").rename(packages / "numpy-2.4.1.dist-info")
    others.append(name())
    assert len({first, *others}) == 7
    assert all(Path(other).name.startswith("train-") for other in others)


def test_function_has_none() -> None:
    assert list_path("lists", ["-u", "-c", "pass"], ()) == ""
