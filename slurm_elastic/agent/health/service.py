"""The health port of an agent, from before its first rendezvous until its end."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import logging
import socket
import threading
from collections.abc import Iterator

from slurm_elastic.agent.health.config import HealthSettings, listen
from slurm_elastic.agent.health.http import Refused
from slurm_elastic.agent.health.pages import NodePages, Reporter
from slurm_elastic.agent.health.server import HealthServer
from slurm_elastic.agent.health.state import AgentState
from slurm_elastic.errors import SlurmElasticError
from slurm_elastic.rundir import RunDir

logger = logging.getLogger("slurm_elastic")

_TIMEOUT = 60
"""Seconds without activity after which the agent is not alive, as with torch's agent (local_elastic_agent.py, 2.13)."""
_CLOSE_TIMEOUT = 2.0


class Health:
    """The agent's interface to its health port.

    Attributes:
        reporter: Gets the changes of the agent's state.
        pages: Gets the functions that read facts for requests.
    """

    def __init__(self, reporter: Reporter) -> None:
        self.reporter = reporter
        self.pages = NodePages(reporter)


@contextlib.contextmanager
def health_port(settings: HealthSettings | None, run_dir: RunDir, state: AgentState) -> Iterator[Health]:
    """Keep the port open during a with block.

    A thread publishes the address in the run directory, in the format of Prometheus' file_sd_configs, reads the token's
    file, and removes the address at the end, because a shared file system may be slow.

    Args:
        settings: The settings; None for no port.
        run_dir: The run directory, opened.
        state: The first state of the agent.

    Raises:
        UsageError: See `listen`.
    """
    health = Health(Reporter(state))
    try:
        if settings is None:
            yield health
            return
        listener = listen(settings)
        server = HealthServer(
            health.pages.last_progress, listener, _TIMEOUT, health.pages, protected=settings.protected
        )
        server.start()
        publication = _Publication(settings, run_dir, state, server)
        try:
            yield health
        finally:
            health.pages.close()
            publication.withdraw()
            server.stop()
    finally:
        health.reporter.close()


def withdraw_lost(run_dir: RunDir, agent: str) -> None:
    """Remove the published address of a lost agent's health port, in a thread.

    Another user may have the port by now, to whom Prometheus would send the token of the run.

    Args:
        run_dir: The run directory.
        agent: The identity of the agent, ``node/job.restarts/pid``.
    """

    def withdraw() -> None:
        node, job, _ = agent.split("/")
        try:
            run_dir.withdraw_health(node, job.partition(".")[0])
        except SlurmElasticError as error:
            logger.warning("where the health port of %s was is still published: %s", node, error)

    threading.Thread(target=withdraw, name="slurm-elastic-health-file", daemon=True).start()


class _Publication:
    def __init__(self, settings: HealthSettings, run_dir: RunDir, state: AgentState, server: HealthServer) -> None:
        self._settings, self._run_dir, self._state, self._server = settings, run_dir, state, server
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._publish, name="slurm-elastic-health-file", daemon=True)
        self._thread.start()

    def withdraw(self) -> None:
        self._over.set()
        self._thread.join(_CLOSE_TIMEOUT)

    def _publish(self) -> None:
        node, job = self._state.node, self._state.job
        host = _host(self._settings.bind, node)
        group = {"targets": [f"{host}:{self._server.port}"], "labels": {"slurm_job": job}}
        try:
            token = self._settings.token
            self._server.token = token if token is not None else self._run_dir.health_token()
        except SlurmElasticError as error:
            self._server.token = Refused(str(error))
            logger.warning("the health pages that take a token are closed: %s", error)
        try:
            self._run_dir.publish_health(node, job, json.dumps([group]).encode() + b"\n")
            self._over.wait()
            self._run_dir.withdraw_health(node, job)
        except SlurmElasticError as error:
            logger.warning(
                "the address of the health port (%s:%d) is not in the run directory: %s", host, self._server.port, error
            )


def _host(bind: str, node: str) -> str:
    address = ipaddress.ip_address(bind)
    if address.is_unspecified:
        return node if node != "localhost" else socket.gethostname()
    return f"[{address}]" if address.version == 6 else str(address)
