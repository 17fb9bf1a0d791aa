"""On which node the agent of the run's first epoch is: ``--leader-node``."""

from __future__ import annotations

import logging

from slurm_elastic.errors import UsageError
from slurm_elastic.slurm import Controller, SlurmJob

__all__ = ["leader_node", "require_known"]

_log = logging.getLogger(__name__)


def leader_node(given: str | None, job: SlurmJob | None, node: str, *, shared: bool) -> str:
    """Return the node whose agent leads if nobody has led this incarnation of the run yet.

    Args:
        given: ``--leader-node``; without it the first node of the job.
        job: None outside Slurm.
        node: this one.
        shared: whether other jobs bring nodes to the run, too; then the leader's may be one of theirs.

    Raises:
        UsageError: the job, which is the whole run, has no such node.
    """
    nodes = job.nodes if job is not None else (node,)
    if not given:
        return nodes[0]
    if given in nodes or (shared and job is not None):
        return given
    if job is None:
        raise UsageError(f"--leader-node {given}: outside Slurm there is one node, {node}; leave the option out")
    if job.restart_count:
        # What was right when the job was submitted must not fail the job because Slurm gave it other nodes since.
        if job.node_rank == 0:
            _log.warning("--leader-node %s is not among the nodes of this start: %s leads", given, nodes[0])
        return nodes[0]
    raise UsageError(f"--leader-node {given} is not a node of this job; it has {', '.join(nodes)}")


def require_known(name: str, controller: Controller) -> None:
    """Refuse a node that Slurm has never heard of: nobody would come from there.

    Raises:
        UsageError: there is none. Where Slurm cannot be asked the name is believed.
    """
    if controller.knows_node(name) is False:
        raise UsageError(f"--leader-node {name}: Slurm knows no such node; see sinfo --Node")
