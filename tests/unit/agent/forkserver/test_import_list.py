"""What is on a list, for what it is valid, and when it is trusted."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from slurm_elastic.agent.forkserver._import_list import (
    ImportList,
    common,
    fingerprint,
    list_path,
    read_list,
    write_list,
)
from slurm_elastic.errors import UsageError


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


def test_function_has_none() -> None:
    assert list_path("lists", ["-u", "-c", "pass"], ()) == ""


def test_list_has_what_all_workers_import_in_the_order_of_the_first() -> None:
    assert common([["b", "a", "tracker", "b"], ["a", "b", "late"]]) == ("b", "a")
    # One that has not come to its imports yet.
    assert common([["b", "a"], []]) == ()
    assert common([]) == ()


@pytest.mark.parametrize(
    ("script", "same"),
    [
        ("import os\n\nrate = 2\nos.environ['A'] = '1'\n", True),
        ("import os, sys\nrate = 1\nos.environ['A'] = '1'\n", False),
        ("import os\nrate = 1\n", False),
    ],
)
def test_list_is_valid_while_the_script_imports_the_same(tmp_path: Path, script: str, same: bool) -> None:
    file = tmp_path / "train.py"
    file.write_text("import os\nrate = 1\nos.environ['A'] = '1'\n")
    imports = ImportList(("a",), files={str(file): fingerprint(str(file))})
    assert imports.is_valid()
    file.write_text(script)
    assert imports.is_valid() is same


def _tear(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-20])


def _open_to_others(file: Path) -> None:
    file.chmod(0o666)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (_tear, "is damaged or was not written by this user; remove it"),
        (_open_to_others, "is not a file of this user's own with mode 0600; remove it"),
    ],
)
def test_list_that_cannot_be_trusted(tmp_path: Path, spoil: Callable[[Path], None], reason: str) -> None:
    file = tmp_path / "lists" / "train-0.json"
    imports = ImportList(("plain",), {"bad": "why"}, ("plain",), {"/train.py": "0"})
    write_list(str(file), imports)
    assert read_list(str(file)) == imports
    assert file.stat().st_mode & 0o777 == 0o600
    assert read_list(str(tmp_path / "lists" / "none.json")) is None
    spoil(file)
    with pytest.raises(UsageError, match=reason):
        read_list(str(file))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives directories away")
def test_list_in_a_directory_of_another_user_is_neither_read_nor_written(tmp_path: Path) -> None:
    file = tmp_path / "lists" / "train-0.json"
    write_list(str(file), ImportList(("plain",)))
    os.chown(file.parent, 1, 1)
    with pytest.raises(UsageError, match="own with mode 0600"):
        read_list(str(file))
    with pytest.raises(UsageError, match="belongs to another user"):
        write_list(str(file), ImportList(("plain",)))
