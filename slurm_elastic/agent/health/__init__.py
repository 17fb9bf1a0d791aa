"""The health port of a node: HTTP pages with the state of the agent.

It extends torch's HealthCheckServer, which is an empty stub in torch 2.13, starts before the first rendezvous and stops
after everything else. A thread of its own answers. The agent replaces one immutable value at each change, and the pages
are pure functions of that value. Without requests nothing runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from slurm_elastic._lazy import lazy

if TYPE_CHECKING:
    from slurm_elastic.agent.health._config import HealthSettings, health_settings
    from slurm_elastic.agent.health._pages import Reporter
    from slurm_elastic.agent.health._server import HealthServer, create_healthcheck_server
    from slurm_elastic.agent.health._service import Health, health_port, withdraw_lost
    from slurm_elastic.agent.health._state import AgentState, Readings, RoundInfo, Stage, WorkerInfo
else:
    # Most parts need no torch, and are imported while its libraries are loaded.
    __getattr__ = lazy(
        __name__,
        {
            "AgentState": "_state",
            "Health": "_service",
            "HealthServer": "_server",
            "HealthSettings": "_config",
            "Readings": "_state",
            "Reporter": "_pages",
            "RoundInfo": "_state",
            "Stage": "_state",
            "WorkerInfo": "_state",
            "create_healthcheck_server": "_server",
            "health_port": "_service",
            "health_settings": "_config",
            "withdraw_lost": "_service",
        },
    )

__all__ = [
    "AgentState",
    "Health",
    "HealthServer",
    "HealthSettings",
    "Readings",
    "Reporter",
    "RoundInfo",
    "Stage",
    "WorkerInfo",
    "create_healthcheck_server",
    "health_port",
    "health_settings",
    "withdraw_lost",
]
