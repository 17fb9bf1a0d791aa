"""The nodes in SLURM_* variables: those of the job, those of the step, and this one."""

from __future__ import annotations

from collections.abc import Mapping

from slurm_elastic.errors import UsageError
from slurm_elastic.slurm._env_values import optional_number, present
from slurm_elastic.slurm.hostlist import expand


def job_and_step_nodes(
    environ: Mapping[str, str], *, in_step: bool, is_het: bool
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the nodes of the job and those of the step; outside a step both are the same.

    Args:
        environ: The environment of this process.
        in_step: True if srun started this process.
        is_het: True in a heterogeneous job.

    Raises:
        UsageError: Variables are missing or malformed, or contradict each other.
    """
    job_nodes = node_list(environ, "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    step_nodes = node_list(environ, "SLURM_STEP_NODELIST") if in_step else None
    if job_nodes is None:
        raise UsageError(
            "SLURM_JOB_ID is set but SLURM_JOB_NODELIST is not; pass all SLURM_ variables on (into a "
            "container too) or unset SLURM_JOB_ID to run outside Slurm"
        )
    # A het step may span components, while SLURM_JOB_NODELIST is that of one component.
    if not is_het:
        _require_count(environ, "SLURM_JOB_NUM_NODES", "SLURM_JOB_NODELIST", job_nodes)
    if step_nodes is None:
        return job_nodes, job_nodes
    _require_count(environ, "SLURM_STEP_NUM_NODES", "SLURM_STEP_NODELIST", step_nodes)
    if is_het:
        # A step that spans components has nodes that no component's own list has.
        return step_nodes, step_nodes
    return job_nodes, step_nodes


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


def _require_count(environ: Mapping[str, str], count: str, names: str, nodes: tuple[str, ...]) -> None:
    expected = optional_number(environ, count)
    if expected is not None and expected != len(nodes):
        raise UsageError(f"{count}={expected} but {names} names {len(nodes)}; Slurm sets both, set neither by hand")


def own_node(environ: Mapping[str, str], nodes: tuple[str, ...], *, is_het: bool) -> str:
    """Return this node as Slurm names it: SLURMD_NODENAME, else `nodes` at SLURM_NODEID.

    Raises:
        UsageError: Neither is set, or the node is none of `nodes`.
    """
    name = present(environ, "SLURMD_NODENAME")
    index = optional_number(environ, "SLURM_NODEID")
    # In a het step the index may count from the first component's first node.
    if index is not None and index >= len(nodes) and not (is_het and name in nodes):
        raise UsageError(
            f"SLURM_NODEID={index} is out of range, the node list names {len(nodes)}; start the agent with srun"
        )
    if name is not None:
        if name not in nodes:
            raise UsageError(
                f"SLURMD_NODENAME={name} is not in the job's node list: variables of another job; "
                "start the agent with srun"
            )
        return name
    if index is None:
        raise UsageError(
            "neither SLURMD_NODENAME nor SLURM_NODEID is set: this shell has an allocation but runs on no "
            "node of it; start the agent with srun"
        )
    return nodes[index]
