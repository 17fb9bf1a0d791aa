"""The health port of an agent, from before its first rendezvous until its end."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import logging
import socket
import threading
from collections.abc import Callable, Iterator

from slurm_elastic.agent.health.pages import NodePages
from slurm_elastic.agent.health.server import HealthServer, HealthSettings, listen
from slurm_elastic.agent.health.state import AgentState, Reporter
from slurm_elastic.errors import SlurmElasticError
from slurm_elastic.rundir import RunDir

logger = logging.getLogger("slurm_elastic")

_TIMEOUT = 60
"""Seconds without activity after which the agent is not alive, as with torch's agent (local_elastic_agent.py, 2.13)."""
_CLOSE_TIMEOUT = 2.0


@contextlib.contextmanager
def health_port(settings: HealthSettings | None, run_dir: RunDir, state: AgentState) -> Iterator[NodePages]:
    """Keep the port open during a with block, and yield its pages, also where there is no port.

    A thread publishes the address in the run directory, in the format of Prometheus' file_sd_configs, reads the token's
    file, and removes the address at the end, because a shared file system may be slow.
    """
    pages = NodePages(Reporter(state))
    try:
        if settings is None:
            yield pages
            return
        server = HealthServer(pages.last_progress, listen(settings), _TIMEOUT, pages, protected=settings.protected)
        server.start()
        over = threading.Event()
        thread = _start_thread(lambda: _publish(settings, run_dir, state, server, over))
        try:
            yield pages
        finally:
            pages.close()
            over.set()
            thread.join(_CLOSE_TIMEOUT)
            server.stop()
    finally:
        pages.reporter.close()


def withdraw_lost(run_dir: RunDir, agent: str) -> None:
    """Remove the published address of a lost agent's health port, in a thread.

    Another user may have the port by now, to whom Prometheus would send the token of the run.
    """

    def withdraw() -> None:
        node, job, _ = agent.split("/")
        try:
            run_dir.withdraw_health(node, job.partition(".")[0])
        except SlurmElasticError as error:
            logger.warning("where the health port of %s was is still published: %s", node, error)

    _start_thread(withdraw)


def _start_thread(target: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=target, name="slurm-elastic-health-file", daemon=True)
    thread.start()
    return thread


def _publish(
    settings: HealthSettings, run_dir: RunDir, state: AgentState, server: HealthServer, over: threading.Event
) -> None:
    node, job, host = state.node, state.job, _host(settings.bind, state.node)
    group = {"targets": [f"{host}:{server.port}"], "labels": {"slurm_job": job}}
    try:
        server.token = settings.token if settings.token is not None else run_dir.health_token()
    except SlurmElasticError as error:
        logger.warning("the health pages that take a token are closed: %s", error)
    try:
        run_dir.publish_health(node, job, json.dumps([group]).encode() + b"\n")
        over.wait()
        run_dir.withdraw_health(node, job)
    except SlurmElasticError as error:
        logger.warning(
            "the address of the health port (%s:%d) is not in the run directory: %s", host, server.port, error
        )


def _host(bind: str, node: str) -> str:
    address = ipaddress.ip_address(bind)
    if address.is_unspecified:
        return node if node != "localhost" else socket.gethostname()
    return f"[{address}]" if address.version == 6 else str(address)
