"""Which variables of an environment are those of this job and this step, and which an outer job or run left there.

sbatch gives a job the environment that it is called in, with all that Slurm and launchers have set there. Submissions,
job-end, the agent and `SlurmJob` ask here; the batch templates unset the same names, which a test compares.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, MutableMapping

from slurm_elastic.slurm._env_values import node_list, present

WORKER_VARIABLES = frozenset(
    {
        *("RANK", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK", "ROLE_RANK", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
        *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
        *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"),
        *("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE"),
        *("SLURM_ELASTIC_RUN_ID", "SLURM_ELASTIC_RUN_DIR", "SLURM_ELASTIC_ROUND", "SLURM_ELASTIC_REASON"),
        *("SLURM_ELASTIC_NODE", "SLURM_ELASTIC_TERM", "SLURM_ELASTIC_EPOCH", "SLURM_ELASTIC_SCOPE"),
        *("SLURM_ELASTIC_DOMAIN", "SLURM_ELASTIC_DOMAIN_RANK", "SLURM_ELASTIC_DOMAIN_SIZE"),
        *("SLURM_ELASTIC_CONTROL", "SLURM_ELASTIC_SNAPSHOT", "SLURM_ELASTIC_CALL", "SLURM_ELASTIC_BAD_NODE_REASON"),
    }
)
"""Facts that an agent or another launcher has for each worker, and that nothing else sets."""
_IN_WORKER = "TORCHELASTIC_RUN_ID"
"""Every torch elastic agent sets it for its workers (torch 2.13, local_elastic_agent.py)."""
_RUN = frozenset(
    f"SLURM_ELASTIC_{name}"
    for name in ("BATCH_VERSION", "GROWS", "LAUNCH_DIR", "LOCAL_RESTARTS", "REHEARSAL", "VERDICT")
)
"""What batch script, launcher, submitit and rehearsal have for the agents of one run; workers inherit some."""
_STEP = ("SLURM_STEP_", "SLURM_STEPID", "SLURM_SRUN_COMM_", "SLURM_LAUNCH_NODE_IPADDR", "SLURM_LABELIO", "SRUN_")
"""What srun sets for its tasks alone. SLURM_STEPMGR, which 24.05 and later set, is of the job."""
_JOB = ("SLURM_", "SLURMD_", "SRUN_", "SUBMITIT_", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")
"""Everything of a job and its steps, with our own facts and settings."""


class Reader(enum.Enum):
    """The processes that read an environment."""

    SUBMISSION = "submission"
    """A process that submits another job."""
    BATCH = "batch"
    """A batch script and its commands, but for the tasks of srun."""
    TASK = "task"
    """A task of srun, or a process that may be one."""


def foreign_variables(environ: Mapping[str, str], reader: Reader) -> frozenset[str]:
    """Return the names of the variables that are not those of the reader's job and step.

    Variables that a user sets stay: settings of ours, also within a job, and PET_* and TORCHELASTIC_TIMER_FILE, unless
    the environment is that of a worker, whose launcher they were for.
    """
    foreign = {name for name in environ if name in WORKER_VARIABLES}
    if _IN_WORKER in environ:
        foreign |= {name for name in environ if name.startswith("PET_")}
        foreign |= {"TORCHELASTIC_TIMER_FILE", "SLURM_ELASTIC_VERDICT"}
    if reader is Reader.SUBMISSION:
        foreign |= _RUN
        if present(environ, "SLURM_JOB_ID") is not None:
            foreign |= {name for name in environ if name.startswith(_JOB) and not _is_setting(name)}
    elif reader is Reader.BATCH or _is_step_of_another_job(environ):
        foreign |= {name for name in environ if name.startswith(_STEP)}
    return frozenset(foreign & environ.keys())


def drop_foreign(environ: MutableMapping[str, str], reader: Reader) -> None:
    """Take out of an environment what is not of the reader's job and step."""
    for name in foreign_variables(environ, reader):
        del environ[name]


def agent_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that are settings of the agents, as their users give them."""
    return {
        name: value
        for name, value in environ.items()
        if name.startswith("PET_") or (_is_setting(name) and name != "SLURM_CONF")
    }


def _is_setting(name: str) -> bool:
    return name == "SLURM_CONF" or (name.startswith("SLURM_ELASTIC_") and name not in WORKER_VARIABLES | _RUN)


def _is_step_of_another_job(environ: Mapping[str, str]) -> bool:
    # A het step may span components, while SLURM_JOB_NODELIST is that of one component.
    if present(environ, "SLURM_HET_SIZE") is not None:
        return False
    job, step = node_list(environ, "SLURM_JOB_NODELIST", "SLURM_NODELIST"), node_list(environ, "SLURM_STEP_NODELIST")
    return not set(step or ()) <= set(job or step or ())
