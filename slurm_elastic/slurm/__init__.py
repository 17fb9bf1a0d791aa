"""What Slurm says and what is asked of it."""

from slurm_elastic.slurm.hostlist import expand, natural_key
from slurm_elastic.slurm.job import ArrayElement, Context, HetComponent, Shape, SlurmJob
from slurm_elastic.slurm.ports import ephemeral_low, port_sequence, ports_exhausted

__all__ = [
    "ArrayElement",
    "Context",
    "HetComponent",
    "Shape",
    "SlurmJob",
    "ephemeral_low",
    "expand",
    "natural_key",
    "port_sequence",
    "ports_exhausted",
]
