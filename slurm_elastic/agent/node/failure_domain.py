"""The failure domain of this node: the label of what fails together with it. Called once, when an agent starts.

`--failure-domain` says who knows it: Slurm (:attr:`~slurm_elastic.slurm.SlurmJob.failure_domain`), the GPUs, or a
command of the site. Membership and snapshots compare labels and know nothing of their origin; without one nothing
changes.
"""

from __future__ import annotations

import logging
import re

from slurm_elastic.agent.node.site_command import run_site_command
from slurm_elastic.slurm import SlurmJob

logger = logging.getLogger("slurm_elastic")

_TIMEOUT = 10.0
"""Seconds for a command: all nodes wait for the last one."""
_LABEL = re.compile(r"[\w.:+/-]{1,128}", re.ASCII)
_FABRIC = re.compile(r"^\s*(CliqueId|ClusterUUID)\s*:\s*(\S+)\s*$", re.MULTILINE)
"""Lines of `nvidia-smi -q` below "Fabric" (driver 550); "N/A" and zeros where a GPU is in no NVLink domain."""


def failure_domain(choice: str, job: SlurmJob | None, interrupt: int) -> str:
    """Return the label of this node's failure domain, its parts from the outermost on between slashes; empty for none.

    Args:
        choice: ``auto``, ``element``, ``switch``, ``block``, ``nvlink``, ``none``, or a command for the shell that
            prints a label as its last line.
        interrupt: A descriptor that is readable after a signal: then a command is not waited for.
    """
    slurm = job.failure_domain.split("/") if job is not None and job.failure_domain else []
    own = slurm[:1] if job is not None and len(job.job_nodes) > 1 else []
    if choice == "none":
        return ""
    if choice in ("auto", "element"):
        return "/".join(slurm if choice == "auto" else own)
    if choice in ("switch", "block"):
        label, lacking = "/".join(slurm[len(own) :]), "Slurm tells no topology (SLURM_TOPOLOGY_ADDR)"
    elif choice == "nvlink":
        command = "nvidia-smi -q | grep -E 'CliqueId|ClusterUUID' | sort -u"
        label = nvlink_domain(run_site_command(command, _TIMEOUT, interrupt=interrupt).output)
        lacking = "nvidia-smi names no NVLink domain that all its GPUs are in"
    else:
        result = run_site_command(choice, _TIMEOUT, interrupt=interrupt)
        label = result.last_line if not result.problem and _LABEL.fullmatch(result.last_line) else ""
        lacking = f"its command {result.problem or 'printed no label as its last line'}"
    if not label:
        logger.warning("--failure-domain %s: this node has no label, %s", choice, lacking)
    return label


def nvlink_domain(output: str) -> str:
    """Return the label of the NVLink domain that all GPUs of a node share; empty if they share none. Pure."""
    values = {
        name: {value for other, value in _FABRIC.findall(output) if other == name}
        for name in ("ClusterUUID", "CliqueId")
    }
    cluster, clique = values["ClusterUUID"], values["CliqueId"]
    if len(cluster) != 1 or len(clique) > 1 or not cluster.isdisjoint({"N/A", "00000000-0000-0000-0000-000000000000"}):
        return ""
    return ".".join([*cluster, *clique])
