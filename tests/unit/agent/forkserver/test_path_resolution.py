"""Directories are resolved once while modules are imported, with the result that os.path.realpath has."""

from __future__ import annotations

import inspect
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from slurm_elastic.agent.forkserver._path_resolution import directories_resolved_once


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Directories and files, some of them symbolic links."""
    (tmp_path / "one/two").mkdir(parents=True)
    (tmp_path / "one/two/module.py").write_text("")
    (tmp_path / "one/two/link.py").symlink_to("module.py")
    (tmp_path / "link").symlink_to("one/two")
    return tmp_path


@pytest.mark.parametrize(
    "path",
    [
        *("one/two/module.py", "one/two/link.py", "one/two/missing.py", "missing/module.py", "one/two", "one//two/"),
        *("link", "link/", "link/module.py", "link/link.py", "link/../module.py", "link/./module.py", "link/..", ""),
    ],
)
def test_the_result_is_that_of_realpath(tree: Path, path: str) -> None:
    name = os.path.join(tree, path)  # noqa: PTH118  it may end in a separator
    with directories_resolved_once():
        assert _inspected_os().path.realpath(name) == os.path.realpath(name)


def test_a_relative_path_is_that_of_the_current_directory(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tree)
    with directories_resolved_once():
        assert _inspected_os().path.realpath("link/module.py") == str(tree.resolve() / "one/two/module.py")


def test_a_directory_is_looked_at_once(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[str] = []
    lstat = os.lstat

    def noted(path: Any) -> os.stat_result:
        looked_at.append(os.fspath(path))
        return lstat(path)

    monkeypatch.setattr(os, "lstat", noted)
    with directories_resolved_once():
        for number in range(10):
            _inspected_os().path.realpath(str(tree / f"one/two/module{number}.py"))
    assert looked_at.count(str(tree / "one/two")) == 1


def test_other_modules_keep_theirs_and_inspect_gets_it_back() -> None:
    realpath = os.path.realpath
    with directories_resolved_once():
        assert os.path.realpath is realpath
        assert _inspected_os().path.realpath is not realpath
    assert _inspected_os() is os


def test_inspect_gets_it_back_after_an_error() -> None:
    with pytest.raises(KeyError), directories_resolved_once():
        raise KeyError
    assert _inspected_os() is os


def test_inspect_finds_the_module_of_a_frame() -> None:
    with directories_resolved_once():
        assert inspect.getmodule(test_inspect_finds_the_module_of_a_frame.__code__) is sys.modules[__name__]


def _inspected_os() -> Any:
    return vars(inspect)["os"]
