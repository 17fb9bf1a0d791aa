"""The check of torch's release and hooks at the start of an agent."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from slurm_elastic.agent.workers import torch_hooks
from slurm_elastic.agent.workers.torch_hooks import _DUMP, HOOKS, Hook, Kind, gaps, require_torch
from slurm_elastic.errors import ExitCode, UsageError

HERE = __name__
CHECKOUT = Path(__file__).parents[3]


class Parts:
    """Stands for a class of torch."""

    def __init__(self, spec: object, *, timeout: int = 3) -> None:
        self._group, self._timeout = spec, timeout

    def take(self, index: int, options: object = None) -> int:
        return index

    def need(self, index: int, more: object) -> int:
        return index


def _gap(kind: Kind, path: str, names: str) -> tuple[str, ...]:
    return gaps([Hook(kind, f"{HERE}:{path}", names)])


def test_this_torch_has_every_hook(caplog: pytest.LogCaptureFixture) -> None:
    assert gaps([*HOOKS, _DUMP]) == ()
    require_torch()
    assert not caplog.messages


def test_the_check_takes_less_than_5_ms() -> None:
    def seconds() -> float:
        began = time.perf_counter()
        gaps([*HOOKS, _DUMP])
        return time.perf_counter() - began

    # The least of several: other processes may have the processor.
    assert min(seconds() for _ in range(10)) < 0.005


@pytest.mark.parametrize(
    ("kind", "path", "names", "found"),
    [
        (Kind.CALLED, "Parts.take", "index options", ()),
        (Kind.CALLED, "Parts.take", "device", ("Parts.take (missing a required argument: 'index')",)),
        (Kind.CALLED, "Parts.need", "index", ("Parts.need (missing a required argument: 'more')",)),
        (Kind.CALLED, "Parts.take", "index old", ("Parts.take (got an unexpected keyword argument 'old')",)),
        (Kind.CALLED, "Parts.gone", "index", ("Parts.gone",)),
        (Kind.CALLED, "Gone.take", "index", ("Gone.take",)),
        (Kind.CALLED, "Parts", "spec timeout", ()),
        (Kind.OVERRIDDEN, "Parts.take", "index options later", ()),
        (Kind.OVERRIDDEN, "Parts.take", "index", ("Parts.take(options), new",)),
        (Kind.SET, "Parts", "_group _timeout", ()),
        (Kind.SET, "Parts", "_group _store", ("Parts._store",)),
    ],
)
def test_a_gap_is_named(kind: Kind, path: str, names: str, found: tuple[str, ...]) -> None:
    assert _gap(kind, path, names) == tuple(f"{HERE.rpartition('.')[2]}.{each}" for each in found)


def test_a_module_that_is_gone_is_named() -> None:
    assert gaps([Hook(Kind.CALLED, "torch.numa.gone:bind", "")]) == ("gone.bind",)


def test_modules_without_compiled_files_are_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in an environment that uv has made, and that only its owner can write to."""
    # What it looks at has been imported by now.
    require_torch()
    caplog.set_level(logging.WARNING)
    spec = SimpleNamespace(cached="/shared/site-packages/torch/__pycache__/__init__.cpython-311.pyc")
    monkeypatch.setattr(torch, "__spec__", spec)
    require_torch()
    assert len(caplog.messages) == 1
    assert caplog.messages[0].endswith(" -m compileall -q /shared/site-packages")


def _mistake() -> str:
    with pytest.raises(UsageError) as caught:
        require_torch()
    assert caught.value.exit_code is ExitCode.USAGE
    return str(caught.value)


def test_a_gap_of_the_agent_is_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    monkeypatch.setattr(torch_hooks, "HOOKS", (Hook(Kind.CALLED, "torch.distributed.run:gone", ""),))
    assert _mistake() == (
        "torch 2.99.0 lacks what the agent needs: run.gone; upgrade slurm_elastic, or install a release of torch that "
        "it was tested with (docs/versions.md)"
    )


@pytest.mark.parametrize("release", ["2.11.0", "2.16.0a0+git1234", "3.0.0"])
def test_a_newer_torch_is_tried(monkeypatch: pytest.MonkeyPatch, release: str) -> None:
    monkeypatch.setattr(torch, "__version__", release)
    require_torch()


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (None, "torch cannot be imported: No module named 'torch'; install it: pip install 'torch>=2.11'"),
        (
            # As torch's own _load_global_deps.
            "import ctypes\nctypes.CDLL('libgone.so.13')",
            "torch cannot be imported: libgone.so.13: cannot open shared object file: No such file or directory; "
            "install a build for this machine: pip install 'torch>=2.11'",
        ),
        (
            "from torch._C import gone",
            "torch cannot be imported: No module named 'torch._C'; install a build for this machine: "
            "pip install 'torch>=2.11'",
        ),
        (
            "__version__ = '2.9.1+cu128'",
            "torch 2.9.1+cu128 is older than 2.11, the oldest that slurm_elastic was tested with; "
            "pip install 'torch>=2.11'",
        ),
        (
            "__version__ = '2.15.0'",
            "torch 2.15.0 is built without distributed (USE_DISTRIBUTED=0); install a build that has it",
        ),
    ],
    ids=["missing", "library", "extension", "old", "without-distributed"],
)
@pytest.mark.parametrize("start", ["warm", "cold"])
def test_an_agent_with_a_torch_that_it_cannot_use_says_one_line(
    tmp_path: Path, content: str | None, line: str, start: str
) -> None:
    """The whole agent, as its fork server imports torch, too."""
    torch_directory = tmp_path / "packages/torch"
    (torch_directory / "distributed").mkdir(parents=True)
    (torch_directory / "__init__.py").write_text(
        content or "raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')"
    )
    (torch_directory / "distributed/__init__.py").write_text("def is_available():\n    return False\n")
    (tmp_path / "train.py").touch()
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "PET_", "LOGLEVEL"))}
    done = subprocess.run(
        [sys.executable, "-m", "slurm_elastic", "agent", "--start", start, "train.py"],
        cwd=tmp_path,
        # Without torch's compiled files the agent would warn of that.
        env={**clean, "PYTHONPATH": f"{tmp_path / 'packages'}:{CHECKOUT}", "PYTHONDONTWRITEBYTECODE": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"slurm-elastic: error: {line}\n")
