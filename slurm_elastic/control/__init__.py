"""The private channel between an agent and each of its workers: stop at one step, progress, fence.

The channel is one page of shared memory per worker and round (`_shared_page`). The agent uses :class:`RoundControl`,
the worker uses :mod:`slurm_elastic.trainer`. Every training script that uses the trainer imports this package, so it
needs the standard library only, and parts for agents are imported when an agent uses them (PEP 562).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from slurm_elastic._lazy import lazy
from slurm_elastic.control._worker_side import (
    RECORDING,
    Stop,
    StopReason,
    WorkerControl,
    attach,
    is_superseded,
    shield,
    unshield,
)

if TYPE_CHECKING:
    from slurm_elastic.control._agent_side import Agreement, RoundControl, TimeUse, WorkerProgress
    from slurm_elastic.control._answers import start_answering
else:
    of_agents = dict.fromkeys(("Agreement", "RoundControl", "TimeUse", "WorkerProgress"), "_agent_side")
    __getattr__ = lazy(__name__, {**of_agents, "start_answering": "_answers"})

__all__ = [
    "RECORDING",
    "Agreement",
    "RoundControl",
    "Stop",
    "StopReason",
    "TimeUse",
    "WorkerControl",
    "WorkerProgress",
    "attach",
    "is_superseded",
    "shield",
    "start_answering",
    "unshield",
]
