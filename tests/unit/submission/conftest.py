"""A login node."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest


@pytest.fixture
def login_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with an installed slurm-elastic, whose sbatch notes that it was called; returns the note."""
    note = tmp_path / "submitted"
    for name in ("srun", "slurm-elastic"):
        (tmp_path / name).touch(mode=0o755)
    sbatch = tmp_path / "sbatch"
    sbatch.write_text(f"#!/bin/sh\ntouch {note}\necho 'sbatch: error: invalid partition specified: nope' >&2\nexit 1\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.delenv("SLURM_ELASTIC_TEMPLATE", raising=False)
    monkeypatch.chdir(tmp_path)
    return note
