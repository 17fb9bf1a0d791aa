"""The private channel between an agent and each of its workers: stop at one step, progress, fence.

One page of shared memory per worker and round (`_page`). The agent's end is :class:`RoundControl`, the worker's end is
behind :mod:`slurm_elastic.trainer`. Every training script that asks pays for the import of this package: it is of the
standard library only, and what agents alone need is imported when they ask for it (PEP 562).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from slurm_elastic._lazy import lazy
from slurm_elastic.control._fence import is_superseded
from slurm_elastic.control._signal_shield import shield, unshield
from slurm_elastic.control._worker_side import Stop, WorkerControl, attach

if TYPE_CHECKING:
    from slurm_elastic.control._agreement import Agreement, WorkerProgress
    from slurm_elastic.control._round import RoundControl
else:
    __getattr__ = lazy(
        __name__,
        {
            "Agreement": "_agreement",
            "WorkerProgress": "_agreement",
            "RoundControl": "_round",
        },
    )

__all__ = [
    "Agreement",
    "RoundControl",
    "Stop",
    "WorkerControl",
    "WorkerProgress",
    "attach",
    "is_superseded",
    "shield",
    "unshield",
]
