from __future__ import annotations

import os
from pathlib import Path

import pytest

from slurm_elastic.errors import UsageError
from slurm_elastic.submission.sbatch import submit


@pytest.fixture
def sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A command in the place of sbatch; returns where it notes its environment."""
    note = tmp_path / "environment"
    (tmp_path / "sbatch").write_text(f"#!/bin/sh\nenv >{note}\necho 12\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return note


def test_nothing_of_the_job_that_submits(sbatch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside = {"SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "4", "SRUN_DEBUG": "3", "SUBMITIT_EXECUTOR": "slurm"}
    kept = {"SLURM_CONF": "/etc/slurm.conf", "SBATCH_ACCOUNT": "me", "WANDB_PROJECT": "digits"}
    for name, value in {**inside, **kept}.items():
        monkeypatch.setenv(name, value)
    assert submit(script="#!/bin/sh\n") == "12"
    seen = dict(line.split("=", 1) for line in sbatch.read_text().splitlines() if "=" in line)
    assert not inside.keys() & seen.keys()
    assert kept.items() <= seen.items()


def test_own_settings_outside_of_a_job(sbatch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setenv("SLURM_TIME_FORMAT", "standard")
    submit(script="#!/bin/sh\n")
    assert "SLURM_TIME_FORMAT=standard" in sbatch.read_text()


def test_no_sbatch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="no sbatch in PATH"):
        submit()
