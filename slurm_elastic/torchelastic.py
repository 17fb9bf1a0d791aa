"""The names that torch documents for its elastic agent and rendezvous, over this project's rendezvous, etcd and health.

For programs that make an agent of their own; `slurm-elastic agent` and `launch` need none of it. The table in
docs/reference.md says where each differs from torch's. What is not here is torch's own and works with these:
WorkerSpec, RunResult, SimpleElasticAgent, DynamicRendezvousHandler, RendezvousParameters.
"""

from __future__ import annotations

import os
import time

from torch.distributed.elastic.agent.server import local_elastic_agent as torchs
from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec
from torch.distributed.elastic.agent.server.health_check_server import HealthCheckServer
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsSpecs

from slurm_elastic.agent.health.server import create_healthcheck_server, health_settings
from slurm_elastic.rendezvous.records.etcd.client import EtcdClient
from slurm_elastic.rendezvous.records.etcd.server import EtcdServer
from slurm_elastic.rendezvous.records.etcd.store import EtcdStore, create_backend
from slurm_elastic.rendezvous.records.etcd.store import EtcdV3RendezvousBackend as EtcdRendezvousBackend
from slurm_elastic.rendezvous.torch_handler import SlurmRendezvousHandler, create_handler

__all__ = [
    "EtcdClient",
    "EtcdRendezvousBackend",
    "EtcdServer",
    "EtcdStore",
    "LocalElasticAgent",
    "SlurmRendezvousHandler",
    "create_backend",
    "create_handler",
    "create_healthcheck_server",
]


class LocalElasticAgent(torchs.LocalElasticAgent):
    """torch's agent: all of its methods can be overridden, and its environment variables have their effect.

    Its main loop, its count of restarts and its exit barrier are torch's (2.13,
    distributed/elastic/agent/server/local_elastic_agent.py); those of `slurm-elastic agent` are not.

    Args:
        spec: torch's description of the workers; its `rdzv_handler` may be that of `create_handler`.
        logs_specs: Destinations of the workers' output; None for the console.
        start_method: How workers of a function start, as in multiprocessing.
        exit_barrier_timeout: Seconds that the agents wait for each other at the end.
        log_line_prefix_template: Prefix of lines on the console.
        health_check_server: The site's own server, started already, as with torch; it stays open through restarts.
            None for one at the port TORCHELASTIC_HEALTH_CHECK_PORT, if that is set.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        logs_specs: LogsSpecs | None = None,
        start_method: str = "spawn",
        exit_barrier_timeout: float = 300,
        log_line_prefix_template: str | None = None,
        health_check_server: HealthCheckServer | None = None,
    ) -> None:
        specs = logs_specs if logs_specs is not None else DefaultLogsSpecs()
        super().__init__(spec, specs, start_method, exit_barrier_timeout, log_line_prefix_template)
        # Under another name than torch's, which stops its server before each restart of the workers.
        self._server = health_check_server

    def run(self, role: str = "default") -> RunResult:
        """Run the workers until they have ended; see torch's SimpleElasticAgent."""
        if self._server is None and (port := os.environ.get("TORCHELASTIC_HEALTH_CHECK_PORT")) is not None:
            # torch makes one for each start of the workers, which opens no port, and passes it the same function.
            alive = getattr(self, "_get_alive_time", lambda: int(time.time()))
            # As in torch 2.13 the agent is not alive after 60 s without progress.
            self._server = create_healthcheck_server(alive, health_settings(None, port, None, {}).port, timeout=60)
            self._server.start()
        try:
            result: RunResult = super().run(role)
            return result
        finally:
            if self._server is not None:
                self._server.stop()
