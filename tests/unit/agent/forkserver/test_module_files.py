"""During imports `inspect` finds the module of a file as it does otherwise, without a look at all modules."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slurm_elastic.agent.forkserver._module_files import modules_found_by_file
from slurm_elastic.agent.forkserver._preload import import_module

# As torch asks where an operator is registered (torch/_library/utils.py, 2.13).
_ASKS = (
    "import inspect, sys\nPLACE = inspect.getframeinfo(sys._getframe(0))\n\ndef frame():\n    return sys._getframe(0)\n"
)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory of modules that ask `inspect` where they are."""
    (tmp_path / "asks_one.py").write_text(_ASKS)
    (tmp_path / "asks_two.py").write_text(_ASKS)
    (tmp_path / "link.py").symlink_to("asks_one.py")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield tmp_path
    for name in ("asks_one", "asks_two", "link"):
        sys.modules.pop(name, None)


def test_no_file_name_of_another_module_is_resolved(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resolved: list[str] = []
    lstat = os.lstat

    def noted(path: Any, **options: Any) -> os.stat_result:
        resolved.append(os.fspath(path))
        return lstat(path, **options)

    monkeypatch.setattr(os, "lstat", noted)
    import_module("asks_one")
    import_module("asks_two")
    assert resolved == []


@pytest.mark.parametrize("name", ["asks_one", "link"])
def test_the_answer_is_that_of_inspect(package: Path, name: str) -> None:
    with modules_found_by_file():
        module: Any = importlib.import_module(name)
        place, found = module.PLACE, inspect.getmodule(module.frame())
    assert place.filename == str(package / f"{name}.py")
    assert place.lineno == 2
    assert place.code_context == ["PLACE = inspect.getframeinfo(sys._getframe(0))\n"]
    assert found is module
    assert inspect.getmodule(module.frame()) is module


def test_a_module_is_found_after_others_were_removed(package: Path) -> None:
    with modules_found_by_file():
        one: Any = importlib.import_module("asks_one")
        assert inspect.getmodule(one.frame()) is one
        del sys.modules["asks_one"]
        two: Any = importlib.import_module("asks_two")
        assert inspect.getmodule(two.frame()) is two


def test_inspect_gets_its_table_back_with_what_was_found(package: Path) -> None:
    table = _table()
    with modules_found_by_file():
        one: Any = importlib.import_module("asks_one")
        assert inspect.getmodule(one.frame()) is one
        assert _table() is not table
    assert _table() is table
    assert table[str(package / "asks_one.py")] == "asks_one"


def test_inspect_gets_its_table_back_after_an_error() -> None:
    table = _table()
    with pytest.raises(KeyError), modules_found_by_file():
        raise KeyError
    assert _table() is table


def _table() -> Any:
    return vars(inspect)["modulesbyfile"]
