from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.local import waiting
from tests.local.agents import ROOT


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder; what agents start there has this checkout's package."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    # Of a job that this process may run in: none of it is the agents'.
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


def eventually(happened: Callable[[], Any], job: Any) -> Any:
    """Wait until this is true, and return it; else cancel the job and fail with what it said."""

    def explain() -> str:
        job.cancel()
        return str(job.stderr())

    return waiting.eventually(happened, explain)
