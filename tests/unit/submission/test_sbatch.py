from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from slurm_elastic.submission.sbatch import submit


def test_nothing_of_the_job_that_submits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: Callable[[str, str], None]
) -> None:
    program("sbatch", f"env >{tmp_path}/environment\necho 12")
    inside = {"SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "4", "SRUN_DEBUG": "3", "SUBMITIT_EXECUTOR": "slurm"}
    kept = {"SLURM_CONF": "/etc/slurm.conf", "SBATCH_ACCOUNT": "me", "WANDB_PROJECT": "digits"}
    for name, value in {**inside, **kept}.items():
        monkeypatch.setenv(name, value)
    assert submit(script="#!/bin/sh\n") == "12"
    lines = (tmp_path / "environment").read_text().splitlines()
    seen = dict(line.split("=", 1) for line in lines if "=" in line)
    assert not inside.keys() & seen.keys()
    assert kept.items() <= seen.items()
