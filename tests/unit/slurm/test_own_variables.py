"""What an outer job, run or launcher has left in an environment is not this job's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slurm_elastic.slurm import Reader, SlurmJob, drop_foreign
from slurm_elastic.slurm.variables import foreign_variables

GOLDEN = json.loads((Path(__file__).parents[2] / "goldens/variables.json").read_text())
WORKER = {
    **dict.fromkeys(("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "NODE_RANK"), "1"),
    "TORCHELASTIC_RUN_ID": "3",
    "TORCHELASTIC_ERROR_FILE": "/gone",
    "TORCHELASTIC_TIMER_FILE": "/gone",
    "SLURM_ELASTIC_RUN_ID": "3",
    "SLURM_ELASTIC_VERDICT": "1",
    "PET_MAX_RESTARTS": "9",
}
OUTER_STEP = {
    "SLURM_STEP_ID": "0",
    "SLURM_STEPID": "0",
    "SLURM_STEP_NODELIST": "n1",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2",
    "SLURM_SRUN_COMM_HOST": "10.0.0.1",
    "SRUN_DEBUG": "3",
    "SLURM_LABELIO": "1",
}
JOB = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "n[2-3]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NODEID": "0",
    "SLURMD_NODENAME": "n2",
    "SLURM_RESTART_COUNT": "1",
    "SLURM_STEPMGR": "n2",
}
SETTINGS = {
    "SLURM_CONF": "/etc/slurm.conf",
    "SLURM_ELASTIC_ETCD_PASSWORD": "secret",
    "SLURM_ELASTIC_TEMPLATE": "mine",
    "SLURM_ELASTIC_GROUP_WRITE": "1",
    "TORCHELASTIC_ENABLE_FILE_TIMER": "0",
    "SBATCH_ACCOUNT": "me",
}
USERS = {"PET_MAX_RESTARTS": "9", "TORCHELASTIC_TIMER_FILE": "/mine", "SRUN_CONTAINER": "/image"}


@pytest.mark.parametrize("reader", [Reader.BATCH, Reader.TASK])
def test_the_leftovers_of_a_step_and_of_a_worker_are_not_this_jobs(reader: Reader) -> None:
    assert foreign_variables({**JOB, **SETTINGS, **OUTER_STEP, **WORKER}, reader) == {*OUTER_STEP, *WORKER}


def test_a_step_of_this_job_stays() -> None:
    own = {**OUTER_STEP, "SLURM_STEP_NODELIST": "n2"}
    assert foreign_variables({**JOB, **SETTINGS, **own, **USERS}, Reader.TASK) == set()
    # A step of a heterogeneous job may have nodes that its own component lacks.
    assert foreign_variables({**JOB, **OUTER_STEP, "SLURM_HET_SIZE": "2"}, Reader.TASK) == set()


def test_a_submission_keeps_settings_alone() -> None:
    environ = {**JOB, **SETTINGS, **OUTER_STEP, **WORKER, "CUDA_VISIBLE_DEVICES": "0", "WANDB_PROJECT": "digits"}
    drop_foreign(environ, Reader.SUBMISSION)
    assert environ == {**SETTINGS, "WANDB_PROJECT": "digits"}


def test_a_submission_outside_of_a_job_keeps_what_the_user_sets() -> None:
    users = {**SETTINGS, **USERS, "SLURM_TIME_FORMAT": "standard", "CUDA_VISIBLE_DEVICES": "0"}
    assert foreign_variables({**users, "MASTER_PORT": "29500"}, Reader.SUBMISSION) == {"MASTER_PORT"}


def test_a_batch_script_with_the_leftovers_of_a_step_elsewhere_is_no_step() -> None:
    job = SlurmJob.from_environment({**JOB, **OUTER_STEP})
    assert job is not None
    assert (job.nodes, job.step_id) == (("n2", "n3"), None)


def test_each_variable_of_ours_is_a_setting_or_a_fact() -> None:
    names = {name for name in GOLDEN["code"] if name.startswith("SLURM_ELASTIC_") and not name.endswith("_")}
    settings = {name for name in names if name.startswith("SLURM_ELASTIC_ETCD_")} | {
        f"SLURM_ELASTIC_{name}" for name in ("GROUP_WRITE", "HEALTH_TOKEN", "STORE_OPEN", "TEMPLATE", "TIME_USE")
    }
    # Room for the title of a process; none that others read.
    title = "SLURM_ELASTIC_WARM"
    assert foreign_variables(dict.fromkeys(names, "1"), Reader.SUBMISSION) == names - settings - {title}
