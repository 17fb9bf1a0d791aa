"""The private channel between an agent and each of its workers: stop at one step, progress, fence.

One page of shared memory per worker and round (`_page`). The agent's end is :class:`RoundControl`, the worker's end is
behind :mod:`slurm_elastic.trainer`. Standard library only, as every training script that asks pays for the import.
"""

from slurm_elastic.control._agreement import Agreement, WorkerProgress
from slurm_elastic.control._directory import ControlDirectory
from slurm_elastic.control._fence import is_superseded
from slurm_elastic.control._round import RoundControl
from slurm_elastic.control._worker import Stop, WorkerControl, attach

__all__ = [
    "Agreement",
    "ControlDirectory",
    "RoundControl",
    "Stop",
    "WorkerControl",
    "WorkerProgress",
    "attach",
    "is_superseded",
]
