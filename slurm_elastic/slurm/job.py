"""The job of this process, parsed once from Slurm's environment variables.

Sources: "OUTPUT ENVIRONMENT VARIABLES" of sbatch(1) and srun(1), Slurm 22.05 to 26.05.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import hostlist

from slurm_elastic.errors import UsageError
from slurm_elastic.slurm import variables

_FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""Step ids from here on are not srun's: batch 0xfffffffb, extern ...fc, interactive ...fa (slurm.h). Slurm 26.05 sets
SLURM_STEP_ID in a batch script, too, and writes these ids with a sign: -5 (env.c, setup_env)."""


@dataclass(frozen=True, slots=True)
class ArrayElement:
    """The element of a job array that this job is (SLURM_ARRAY_*)."""

    job_id: str
    """Id of the array, the same for every element."""
    task_id: int
    """Index of this element; ``<job_id>_<task_id>`` names it to scontrol."""
    task_count: int | None
    """Number of elements that the array was submitted with; None if unknown."""


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """The job of this process.

    Slurm sets the variables when it starts a process, so nodes that were lost later are still included.
    """

    job_id: str
    """SLURM_JOB_ID. Elements of an array have one each. Survives a requeue."""
    submit_dir: Path | None
    """SLURM_SUBMIT_DIR: where sbatch was called."""
    nodes: tuple[str, ...]
    """Names in Slurm's order, each once: of the step when srun started this process, else of the job."""
    job_nodes: tuple[str, ...]
    """All nodes of the job; more than `nodes` for a step on some of them."""
    node: str
    """This node as Slurm names it, never its host name: SLURMD_NODENAME, else `nodes` at SLURM_NODEID."""
    node_rank: int
    """Index of `node` in `nodes`. 0 in every array element of one node."""
    array: ArrayElement | None
    het: tuple[tuple[str, ...], ...]
    """The nodes of each component of a heterogeneous job (SLURM_HET_SIZE); empty for any other job."""
    step_id: str | None
    """SLURM_STEP_ID if srun has started this process; None in the batch script and in the shell of salloc."""
    restart_count: int
    """How often Slurm requeued the job. Slurm leaves SLURM_RESTART_COUNT unset on the first run: 0."""
    gpus_on_node: int
    """SLURM_GPUS_ON_NODE, else what CUDA_VISIBLE_DEVICES lists; 0 if none is set."""
    reserved_ports: tuple[int, ...]
    """SLURM_STEP_RESV_PORTS, reserved for this step by ``srun --resv-ports``; mostly empty."""
    topology_address: str | None
    """SLURM_TOPOLOGY_ADDR, such as ``s0.s4.node7``: the switches or blocks above this node. None without a topology."""

    @property
    def position(self) -> int:
        """Index of `node` in the job's node list, the same in every step: the order of ranks."""
        return self.job_nodes.index(self.node)

    @property
    def run_id(self) -> str:
        """Id of the run of this step, unless another step is that run already: the step 0 is left out."""
        return self.name if self.step_id in (None, "0") else f"{self.name}.{self.step_id}"

    @property
    def name(self) -> str:
        """Name that scontrol has for this job only: ``12``, for an array element ``12_3``.

        One element has the array's id as its job id, and scontrol takes that for all elements.
        """
        return self.job_id if self.array is None else f"{self.array.job_id}_{self.array.task_id}"

    @property
    def failure_domain(self) -> str:
        """The label of what fails together with this node, as far as Slurm knows, such as ``12_3/s0/s4``; else empty.

        An element of an array is preempted as one, so it is a domain if it has several nodes; so is any job. Below that
        come the switches or blocks of the node.
        """
        own = [self.name] if len(self.job_nodes) > 1 else []
        address = self.topology_address or ""
        # "switch.switch.node" (topology/tree), "block.node" (topology/block, 23.11 and later).
        above = address.removesuffix(self.node).strip(".")
        return "/".join([*own, *above.split(".")] if above else own)

    @property
    def cohort(self) -> tuple[str, int]:
        """Unique name of the step that started this process, and the number of its nodes; outside a step empty and 1.

        A requeued job's steps have other names than those of its earlier starts.
        """
        if self.step_id is None:
            return "", 1
        return f"{self.job_id}.{self.restart_count}.{self.step_id}", len(self.nodes)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> SlurmJob | None:
        """Parse the environment of a batch script or of a task of srun.

        Returns:
            None outside Slurm.

        Raises:
            UsageError: Variables are missing or malformed, or contradict each other, or srun has started more than one
                task on a node.
        """
        foreign = variables.foreign_variables(environ, variables.Reader.TASK)
        environ = {name: value for name, value in environ.items() if name not in foreign}
        job_id = variables.present(environ, "SLURM_JOB_ID", "SLURM_JOBID")
        if job_id is None:
            _require_no_job(environ)
            return None
        if not job_id.isascii() or not job_id.isdigit():
            raise UsageError(f"SLURM_JOB_ID={job_id!r} is not a job id; unset it to run outside Slurm")
        step_id = _step_id(environ)
        het = _het(environ)
        job_nodes, nodes = variables.job_and_step_nodes(environ, in_step=step_id is not None, is_het=bool(het))
        if step_id is not None:
            _require_one_task_per_node(environ)
        node = variables.own_node(environ, nodes)
        return cls(
            job_id=job_id,
            submit_dir=Path(text) if (text := variables.present(environ, "SLURM_SUBMIT_DIR")) else None,
            nodes=nodes,
            job_nodes=job_nodes,
            node=node,
            node_rank=nodes.index(node),
            array=_array(environ),
            het=het,
            step_id=step_id,
            restart_count=variables.optional_number(environ, "SLURM_RESTART_COUNT") or 0,
            gpus_on_node=variables.count_gpus(environ),
            reserved_ports=variables.port_list(environ, "SLURM_STEP_RESV_PORTS") if step_id is not None else (),
            topology_address=_topology_address(environ),
        )


def _require_no_job(environ: Mapping[str, str]) -> None:
    for name in ("SLURM_JOB_NODELIST", "SLURM_NODELIST", "SLURM_STEP_NODELIST", "SLURM_STEP_ID"):
        if variables.present(environ, name) is not None:
            raise UsageError(
                f"{name} is set but SLURM_JOB_ID is not; pass all SLURM_ variables on (into a container too) "
                f"or unset {name} to run outside Slurm"
            )


def _step_id(environ: Mapping[str, str]) -> str | None:
    text = variables.present(environ, "SLURM_STEP_ID", "SLURM_STEPID")
    if text is None or re.fullmatch(r"-[0-9]{1,2}", text):
        return None
    return text if variables.number("SLURM_STEP_ID", text) < _FIRST_SPECIAL_STEP else None


def _require_one_task_per_node(environ: Mapping[str, str]) -> None:
    name = "SLURM_STEP_TASKS_PER_NODE"
    text = variables.present(environ, name) or "1"
    try:
        # Such as 2(x3),1; with 0 times (x0) there is no number.
        tasks = max(hostlist.parse_slurm_tasks_per_node(text))
    except (hostlist.BadHostlist, ValueError):
        raise UsageError(f"{name}={text!r} is not of the form 2(x3),1; Slurm sets it, do not set it by hand") from None
    if tasks > 1 or (variables.optional_number(environ, "SLURM_LOCALID") or 0) > 0:
        raise UsageError("more than one task on a node; start one agent per node: srun --ntasks-per-node=1")


def _array(environ: Mapping[str, str]) -> ArrayElement | None:
    job_id = variables.present(environ, "SLURM_ARRAY_JOB_ID")
    task_id = variables.optional_number(environ, "SLURM_ARRAY_TASK_ID")
    if job_id is None and task_id is None:
        return None
    if job_id is None or task_id is None:
        raise UsageError("one of SLURM_ARRAY_JOB_ID and SLURM_ARRAY_TASK_ID is not set; pass both on, or unset both")
    return ArrayElement(
        job_id=str(variables.number("SLURM_ARRAY_JOB_ID", job_id)),
        task_id=task_id,
        task_count=variables.optional_number(environ, "SLURM_ARRAY_TASK_COUNT"),
    )


def _het(environ: Mapping[str, str]) -> tuple[tuple[str, ...], ...]:
    size = variables.optional_number(environ, "SLURM_HET_SIZE") or 0
    return tuple(variables.node_list(environ, f"SLURM_JOB_NODELIST_HET_GROUP_{index}") or () for index in range(size))


def _topology_address(environ: Mapping[str, str]) -> str | None:
    # Without a topology Slurm puts the bare node name there, with the pattern "node" (topology/none, 22.05).
    if (variables.present(environ, "SLURM_TOPOLOGY_ADDR_PATTERN") or "node") == "node":
        return None
    return variables.present(environ, "SLURM_TOPOLOGY_ADDR")
