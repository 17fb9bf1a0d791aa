"""What is read before it is imported is found again, once, and leaves no trace."""

from __future__ import annotations

import importlib
import importlib.util
import os
import py_compile
import sys
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest

from slurm_elastic.agent.forkserver._bytecode_prefetch import ReadAhead

TOP = "read_ahead_sample"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package with a module and a package within it; both compiled."""
    inner = tmp_path / TOP / "inner"
    inner.mkdir(parents=True)
    (tmp_path / TOP / "__init__.py").write_text("")
    (inner / "__init__.py").write_text("content = 'package'\n")
    (inner / "module.py").write_text("content = 'module'\n")
    for file in (inner / "__init__.py", inner / "module.py"):
        py_compile.compile(str(file))
    monkeypatch.syspath_prepend(tmp_path)
    yield inner
    for name in [name for name in sys.modules if name.partition(".")[0] == TOP]:
        del sys.modules[name]


def never() -> bool:
    return False


def compiled(source: Path) -> Path:
    return Path(importlib.util.cache_from_source(str(source)))


@pytest.mark.parametrize(("name", "what"), [("inner", "package"), ("inner.module", "module")])
def test_module_is_not_read_again(package: Path, name: str, what: str) -> None:
    read_ahead = ReadAhead()
    read_ahead.read([f"{TOP}.inner"], never)
    assert f"{TOP}.{name}" not in sys.modules
    for file in package.glob("**/*.py*"):
        file.write_bytes(b"neither source nor compiled: whoever reads it fails")
    module = importlib.import_module(f"{TOP}.{name}")
    read_ahead.close()
    assert module.content == what


def test_module_is_as_any_other(package: Path) -> None:
    finders = [*sys.meta_path]
    read_ahead = ReadAhead()
    read_ahead.read([f"{TOP}.inner"], never)
    read = importlib.import_module(f"{TOP}.inner.module")
    read_ahead.close()
    assert sys.meta_path == finders
    del sys.modules[f"{TOP}.inner.module"]
    plain = importlib.import_module(f"{TOP}.inner.module")
    assert read.__spec__ == plain.__spec__
    assert {**vars(read)}.keys() == {**vars(plain)}.keys()
    assert type(read.__loader__) is SourceFileLoader
    assert vars(read.__loader__) == vars(plain.__loader__)


def test_stale_compiled_file_is_not_believed(package: Path) -> None:
    (package / "module.py").write_text("content = 'a newer module'\n")
    os.utime(package / "module.py", (1, 1))
    read_ahead = ReadAhead()
    read_ahead.read([f"{TOP}.inner"], never)
    module = importlib.import_module(f"{TOP}.inner.module")
    read_ahead.close()
    assert module.content == "a newer module"


def test_what_is_not_compiled_is_left_alone(package: Path) -> None:
    compiled(package / "module.py").unlink()
    read_ahead = ReadAhead()
    read_ahead.read([f"{TOP}.inner", f"{TOP}.missing", "missing_read_ahead_sample.inner"], never)
    names = read_ahead.names
    read_ahead.close()
    assert names == [f"{TOP}.inner"]
    assert not compiled(package / "module.py").exists()


def test_another_directory_has_its_own_module(package: Path, tmp_path: Path) -> None:
    read_ahead = ReadAhead()
    read_ahead.read([f"{TOP}.inner"], never)
    other = tmp_path / "other"
    other.mkdir()
    (other / "module.py").write_text("content = 'another'\n")
    parent = importlib.import_module(f"{TOP}.inner")
    parent.__path__ = [str(other)]
    module = importlib.import_module(f"{TOP}.inner.module")
    read_ahead.close()
    assert module.content == "another"


def test_no_more_is_read_than_enough(package: Path) -> None:
    read_ahead = ReadAhead()
    read_ahead.read([f"{TOP}.inner"], lambda: True)
    (package / "module.py").write_text("content = 'changed since'\n")
    os.utime(package / "module.py", (1, 1))
    module = importlib.import_module(f"{TOP}.inner.module")
    read_ahead.close()
    assert module.content == "changed since"
