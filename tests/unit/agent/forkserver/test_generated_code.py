"""Code that `dataclasses` generates is compiled once for all runs, and what it makes is what the compiler makes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from slurm_elastic.agent.forkserver import _generated_code
from slurm_elastic.agent.forkserver._generated_code import GeneratedCode

_METHODS = ("__init__", "__repr__", "__eq__", "__hash__", "__setattr__", "__lt__")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def lists(tmp_path: Path) -> str:
    """The directory of lists, beside the runs."""
    return str(tmp_path / "elastic-runs" / ".imports")


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The sources that are compiled from now on."""
    found: list[str] = []

    def noted(source: str, *arguments: Any, **options: Any) -> Any:
        found.append(source)
        return compile(source, *arguments, **options)

    monkeypatch.setattr(_generated_code, "compile", noted, raising=False)
    return found


def _make() -> type[Any]:
    return dataclasses.make_dataclass(
        "Pair", [("first", int), ("second", str, dataclasses.field(default="two"))], frozen=True, order=True
    )


def _made(code: GeneratedCode) -> type[Any]:
    with code.reused():
        return _make()


def test_a_later_run_compiles_nothing(lists: str, compiled: list[str]) -> None:
    first = GeneratedCode()
    first.read(lists)
    _made(first)
    first.keep()
    assert compiled
    compiled.clear()
    later = GeneratedCode()
    later.read(lists)
    _made(later)
    assert compiled == []


def test_classes_are_those_that_dataclasses_makes(lists: str) -> None:
    first, later, plain = GeneratedCode(), GeneratedCode(), _make()
    first.read(lists)
    compiled = _made(first)
    first.keep()
    later.read(lists)
    for made in (compiled, _made(later)):
        one = made(1)
        assert repr(one) == "Pair(first=1, second='two')"
        assert one == made(1, "two")
        assert hash(one) == hash(made(1))
        assert one < made(2)
        with pytest.raises(dataclasses.FrozenInstanceError):
            one.first = 2
        for name in _METHODS:
            assert getattr(made, name).__code__ == getattr(plain, name).__code__
            assert getattr(made, name).__code__.co_filename == getattr(plain, name).__code__.co_filename


def test_each_class_gets_code_of_its_own(lists: str) -> None:
    """As from the compiler: others, torch._dynamo for one, keep what they know of a function by its code."""
    first, later = GeneratedCode(), GeneratedCode()
    first.read(lists)
    _made(first)
    first.keep()
    later.read(lists)
    one, other = _made(later), _made(later)
    assert one.__init__.__code__ is not other.__init__.__code__


def test_what_is_compiled_later_comes_on_top(lists: str, compiled: list[str]) -> None:
    first = GeneratedCode()
    first.read(lists)
    _made(first)
    first.keep()
    with first.reused():
        dataclasses.make_dataclass("Single", ["only"])
    first.keep()
    compiled.clear()
    later = GeneratedCode()
    later.read(lists)
    _made(later)
    with later.reused():
        dataclasses.make_dataclass("Single", ["only"])
    assert compiled == []


def test_a_file_that_cannot_be_trusted_is_not_used_and_is_replaced(lists: str, compiled: list[str]) -> None:
    first = GeneratedCode()
    first.read(lists)
    _made(first)
    first.keep()
    (file,) = Path(lists).iterdir()
    good = file.read_bytes()
    file.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    compiled.clear()
    later = GeneratedCode()
    later.read(lists)
    _made(later)
    assert compiled
    later.keep()
    assert file.read_bytes() == good


def test_nothing_is_kept_where_nothing_is_learned(lists: str) -> None:
    code = GeneratedCode()
    code.read(None)
    _made(code)
    code.keep()
    assert not Path(lists).exists()


def test_dataclasses_gets_its_names_back() -> None:
    with pytest.raises(KeyError), GeneratedCode().reused():
        raise KeyError
    assert "exec" not in vars(dataclasses)
