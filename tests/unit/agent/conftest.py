from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def clean_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, clean_environment: None) -> None:
    """A directory with a script, and nothing in the environment that the agent reads."""
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("")
