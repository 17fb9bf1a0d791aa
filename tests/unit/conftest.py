"""What tests of several packages begin with."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from slurm_elastic.rundir import RunDir


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    """Give the directory of run 7."""
    return RunDir.for_run(tmp_path, "7").open()


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Put a program with this name and these lines of bash before all others."""
    directory = tmp_path / "bin"

    def install(name: str, body: str) -> None:
        if not directory.exists():
            directory.mkdir()
            monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")
        (directory / name).write_text(f"#!/bin/bash\n{body}\n")
        (directory / name).chmod(0o755)

    return install


@pytest.fixture
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take away what this process has of Slurm and of torchrun."""
    for name in list(os.environ):
        if name.startswith(("PET_", "SLURM", "TORCHELASTIC_", "TORCH_ELASTIC_", "PYTHON_EXEC")):
            monkeypatch.delenv(name)
