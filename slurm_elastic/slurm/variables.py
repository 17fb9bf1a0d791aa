"""The variables of Slurm in an environment: their values, and which of them are of this job and this step.

sbatch gives a job the environment that it is called in, with all that Slurm and launchers have set there for an outer
job or run. Submissions, job-end, the agent and `SlurmJob` ask here; the batch templates unset the same names, which a
test compares.
"""

from __future__ import annotations

import enum
import itertools
import re
from collections.abc import Mapping, MutableMapping

from slurm_elastic.errors import UsageError
from slurm_elastic.slurm.hostlist import expand

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


def present(environ: Mapping[str, str], *names: str) -> str | None:
    """Return the value of the first variable that is set and not empty; None if there is none.

    Slurm writes ``(null)`` to some variables that have no value.
    """
    for name in names:
        value = environ.get(name, "").strip()
        if value not in ("", "(null)"):
            return value
    return None


def number(name: str, text: str) -> int:
    """Return a variable's value as a number.

    Raises:
        UsageError: The value has other characters than digits.
    """
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise UsageError(f"{name}={text!r} is not a number; Slurm sets it, do not set it by hand")
    return int(text)


def optional_number(environ: Mapping[str, str], *names: str) -> int | None:
    """Return the value of the first variable that is set, as a number; None if none is set."""
    text = present(environ, *names)
    return None if text is None else number(names[0], text)


def port_list(environ: Mapping[str, str], name: str) -> tuple[int, ...]:
    """Return the ports of a variable such as SLURM_STEP_RESV_PORTS, ``21000-21001,21005``."""
    text = present(environ, name)
    if text is None:
        return ()
    try:
        ports = [int(port) for port in expand(f"[{text.strip('[]')}]")]
    except (UsageError, ValueError):
        ports = [0]
    if not 0 < min(ports) <= max(ports) < 65536:
        raise UsageError(f"{name}={text!r} is not a list of ports; Slurm sets it, do not set it by hand")
    return tuple(ports)


def count_gpus(environ: Mapping[str, str]) -> int:
    """Return the number of GPUs that the job or step has on this node."""
    # Slurm writes the number (22.05 to 26.05, gres_common.c).
    count = optional_number(environ, "SLURM_GPUS_ON_NODE")
    if count is not None:
        return count
    devices = filter(None, (item.strip() for item in environ.get("CUDA_VISIBLE_DEVICES", "").split(",")))
    # CUDA stops at the first invalid index, such as -1 (CUDA C Programming Guide, CUDA_VISIBLE_DEVICES).
    return len([*itertools.takewhile(lambda device: device[0] != "-" and device != "NoDevFiles", devices)])


def job_and_step_nodes(
    environ: Mapping[str, str], *, in_step: bool, is_het: bool
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the nodes of the job and those of the step; outside a step both are the same.

    Raises:
        UsageError: Variables are missing or malformed.
    """
    job_nodes = node_list(environ, "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    step_nodes = node_list(environ, "SLURM_STEP_NODELIST") if in_step else None
    if job_nodes is None:
        raise UsageError(
            "SLURM_JOB_ID is set but SLURM_JOB_NODELIST is not; pass all SLURM_ variables on (into a "
            "container too) or unset SLURM_JOB_ID to run outside Slurm"
        )
    nodes = job_nodes if step_nodes is None else step_nodes
    # A step that spans components has nodes that no component's own list has.
    return nodes if is_het else job_nodes, nodes


def node_list(environ: Mapping[str, str], *names: str) -> tuple[str, ...] | None:
    """Return the names in the first of these variables that is set, each once, in Slurm's order; None if none is set.

    Raises:
        UsageError: The value is no host list.
    """
    text = present(environ, *names)
    if text is None:
        return None
    try:
        return tuple(dict.fromkeys(expand(text)))
    except UsageError as error:
        raise UsageError(f"{names[0]}: {error}") from None


def own_node(environ: Mapping[str, str], nodes: tuple[str, ...]) -> str:
    """Return this node as Slurm names it: SLURMD_NODENAME, else `nodes` at SLURM_NODEID.

    Raises:
        UsageError: Neither is set, or the node is none of `nodes`.
    """
    name = present(environ, "SLURMD_NODENAME")
    if name in nodes:
        return name
    if name is not None:
        raise UsageError(
            f"SLURMD_NODENAME={name} is not in the job's node list: variables of another job; start the agent with srun"
        )
    index = optional_number(environ, "SLURM_NODEID")
    if index is None:
        raise UsageError(
            "neither SLURMD_NODENAME nor SLURM_NODEID is set: this shell has an allocation but runs on no "
            "node of it; start the agent with srun"
        )
    if index >= len(nodes):
        raise UsageError(
            f"SLURM_NODEID={index} is out of range, the node list names {len(nodes)}; start the agent with srun"
        )
    return nodes[index]
