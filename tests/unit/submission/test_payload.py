from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import cloudpickle
import pytest

from slurm_elastic.errors import UsageError
from slurm_elastic.submission.payload import Script, require_importable


@pytest.fixture
def function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """A function of a package beside the script, in a process that works elsewhere."""
    package = tmp_path / "scripts/beside_script"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "model.py").write_text("def train(): pass\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "scripts"), *sys.path])
    monkeypatch.chdir(tmp_path)
    train: Callable[[], None] = importlib.import_module("beside_script.model").train
    yield train
    for name in ("beside_script.model", "beside_script"):
        del sys.modules[name]


def test_module_beside_the_script(function: Callable[[], None], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"beside_script.model lies beside the script, in {tmp_path}/scripts"):
        require_importable(function)


def test_from_path_or_directory(function: Callable[[], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as found:
        found.setattr(sys, "path", [*sys.path, str(tmp_path / "scripts")])
        require_importable(function)
    # As it is in the current directory.
    monkeypatch.chdir(tmp_path / "scripts")
    require_importable(function)


def test_sent_by_value(function: Callable[[], None]) -> None:
    module = sys.modules["beside_script"]
    cloudpickle.register_pickle_by_value(module)
    try:
        require_importable(function)
    finally:
        cloudpickle.unregister_pickle_by_value(module)


@pytest.mark.parametrize("function", [print, Path, len, lambda: None])
def test_of_python_itself(function: object) -> None:
    require_importable(function)


def test_a_script_that_ends_with_another_exit_code_than_0_is_no_success(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("import sys\nsys.exit(int(sys.argv[1]))\n")
    Script(str(path), ("0",))()
    with pytest.raises(RuntimeError, match=r"train\.py ended with 3"):
        Script(str(path), ("3",))()
