from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from slurm_elastic.cli.commands import job_end
from slurm_elastic.rundir import RunDir, join_own
from slurm_elastic.slurm import SlurmJob
from slurm_elastic.submission.sbatch import Started, read_start

JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NODEID": "0", "SLURMD_NODENAME": "n1"}
SETTINGS = {"PET_RDZV_CONF": "heartbeat_limit=5", "SLURM_ELASTIC_ETCD_CREDENTIALS": "/c"}
STEP = {**JOB, "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "n[1-2]"}


@pytest.fixture
def slurm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clean_environment: None, program: Callable[[str, str], None]
) -> Path:
    """What scontrol is asked; it writes a batch script and shows a job."""
    shown = "echo 'JobId=7 JobName=x'\necho '   Partition=low CPUs/Task=1'"
    program("scontrol", f"echo $* >>{tmp_path}/calls\n[ $1 = write ] && exec echo '#!/bin/bash'\n{shown}")
    for name, value in {**SETTINGS, **JOB, "SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_ELASTIC_VERDICT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "calls"


def test_the_batch_script_keeps_how_its_run_was_started_once(tmp_path: Path, slurm: Path) -> None:
    arguments = ["--max-restarts=3", "train.py", "--lr", "1e-3"]
    assert not job_end._keep_start(arguments), "no agent has begun the run"
    job = SlurmJob.from_environment(STEP)
    assert job is not None
    run_dir = join_own(tmp_path, job, arguments[1:])
    assert read_start(run_dir) is None
    assert job_end._keep_start(arguments)
    assert job_end._keep_start(["other.py"])
    kept = read_start(run_dir)
    assert kept == Started(
        "#!/bin/bash\n",
        {"partition": "low", "cpus-per-task": "1"},
        tuple(arguments),
        str(tmp_path),
        SETTINGS,
    )
    assert (run_dir.path / "command.json").stat().st_mode & 0o777 == 0o600
    assert len(slurm.read_text().splitlines()) == 2


def test_a_record_that_this_run_has_not_written_does_not_count(run_dir: RunDir) -> None:
    run_dir.secret()
    record = {"script": "", "options": {}, "arguments": [], "directory": ""}
    (run_dir.path / "command.json").write_text(json.dumps(record))
    assert read_start(run_dir) is None
