"""The health port of a node: whoever reaches it can ask at any time what the agent is doing.

It is torch's HealthCheckServer, which in torch 2.13 is an empty stub, started before the first rendezvous and stopped
after everything else. A thread of its own answers; the agent replaces one immutable value whenever something changes,
and the pages are pure functions of that. Nothing is done while nobody asks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from slurm_elastic._lazy import lazy

if TYPE_CHECKING:
    from slurm_elastic.agent.health._listener import HealthSettings, health_settings
    from slurm_elastic.agent.health._port import Health, health_port
    from slurm_elastic.agent.health._reporter import Reporter
    from slurm_elastic.agent.health._server import HealthServer
    from slurm_elastic.agent.health._snapshot import Place, Snapshot, Stage, WorkerPlace
else:
    # Most parts need no torch, and are imported while its libraries are loaded.
    __getattr__ = lazy(
        __name__,
        {
            "Health": "_port",
            "HealthServer": "_server",
            "HealthSettings": "_listener",
            "Place": "_snapshot",
            "Reporter": "_reporter",
            "Snapshot": "_snapshot",
            "Stage": "_snapshot",
            "WorkerPlace": "_snapshot",
            "health_port": "_port",
            "health_settings": "_listener",
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
