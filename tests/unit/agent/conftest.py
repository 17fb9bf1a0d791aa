from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture
def clean_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A directory with a script, and nothing in the environment that the agent reads."""
    for name in list(os.environ):
        if name.startswith(("PET_", "SLURM", "TORCHELASTIC_", "TORCH_ELASTIC_", "PYTHON_EXEC")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("")
