"""The health port of a node: whoever reaches it can ask at any time what the agent is doing.

It is torch's HealthCheckServer, which in torch 2.13 is an empty stub, started before the first rendezvous and stopped
after everything else. A thread of its own answers; the agent replaces one immutable value whenever something changes,
and the pages are pure functions of that. Nothing is done while nobody asks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from slurm_elastic._lazy import lazy

if TYPE_CHECKING:
    from slurm_elastic.agent.health._config import HealthSettings, health_settings
    from slurm_elastic.agent.health._server import HealthServer
    from slurm_elastic.agent.health._service import Health, health_port
    from slurm_elastic.agent.health._state import Place, Snapshot, Stage, WorkerPlace
    from slurm_elastic.agent.health._status_reporter import Reporter
else:
    # Most parts need no torch, and are imported while its libraries are loaded.
    __getattr__ = lazy(
        __name__,
        {
            "Health": "_service",
            "HealthServer": "_server",
            "HealthSettings": "_config",
            "Place": "_state",
            "Reporter": "_status_reporter",
            "Snapshot": "_state",
            "Stage": "_state",
            "WorkerPlace": "_state",
            "health_port": "_service",
            "health_settings": "_config",
        },
    )

__all__ = [
    "Health",
    "HealthServer",
    "HealthSettings",
    "Place",
    "Reporter",
    "Snapshot",
    "Stage",
    "WorkerPlace",
    "health_port",
    "health_settings",
]
