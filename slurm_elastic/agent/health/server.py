"""The health port of an agent, from before its first rendezvous until its end: settings, socket and server.

Its clients may be slow, wrong or hostile.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import json
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import cast

from torch.distributed.elastic.agent.server.health_check_server import HealthCheckServer

from slurm_elastic.agent.health.http import (
    LIVENESS,
    MAX_HEAD,
    HTTPError,
    Request,
    Response,
    find,
    liveness,
    read_request,
)
from slurm_elastic.agent.health.pages import NodePages
from slurm_elastic.agent.health.state import AgentState, Reporter
from slurm_elastic.errors import SlurmElasticError, UsageError
from slurm_elastic.rendezvous.run_in_thread import run_in_thread
from slurm_elastic.rundir import RunDir

logger = logging.getLogger("slurm_elastic")

_LOOPBACK = "127.0.0.1"
_PORT_VARIABLE = "TORCHELASTIC_HEALTH_CHECK_PORT"
_TOKEN_VARIABLE = "SLURM_ELASTIC_HEALTH_TOKEN"
_TOKEN = re.compile(r"[!-~]{16,512}")
_BACKLOG = 1024
_AT_ONCE = 16
"""Connections accepted in one turn of the loop: few beside those that are open, so that each is read before too many
newer ones are there."""
_STOP_TIMEOUT = 2.0


@dataclass(frozen=True, slots=True)
class HealthSettings:
    """The user's settings of the health port.

    Attributes:
        token: The token that clients have to send; None for that of the run directory.
    """

    bind: str = _LOOPBACK
    port: int = 0
    token: str | None = field(default=None, repr=False)

    @property
    def protected(self) -> bool:
        """True if users of other nodes reach the port, so that all pages but liveness require the token."""
        return not ipaddress.ip_address(self.bind).is_loopback


def health_settings(
    bind: str | None, port: str | None, token_file: str | None, environ: Mapping[str, str]
) -> HealthSettings:
    """Resolve the options; None for options that are not given.

    Without ``--health-port`` the port is torch's TORCHELASTIC_HEALTH_CHECK_PORT. The token may also be in
    SLURM_ELASTIC_HEALTH_TOKEN.

    Raises:
        UsageError: A value is malformed, or the token's file cannot be used.
    """
    address = bind or _LOOPBACK
    try:
        ipaddress.ip_address(address)
    except ValueError:
        raise UsageError(
            f"--health-bind {address!r} is no IP address; give 0.0.0.0 for all addresses of this node, or one of them"
        ) from None
    name, text = ("--health-port", port) if port is not None else (_PORT_VARIABLE, environ.get(_PORT_VARIABLE, "0"))
    if not re.fullmatch(r"[0-9]{1,5}", text.strip()) or int(text) > 65535:
        raise UsageError(f"{name} {text!r} is no port; give a number up to 65535, or 0 for any free one")
    token = _read_token(Path(token_file)) if token_file else environ.get(_TOKEN_VARIABLE)
    if token is not None and not _TOKEN.fullmatch(token):
        where = token_file or _TOKEN_VARIABLE
        raise UsageError(
            f"{where} has no token: give one line of 16 to 512 visible characters, as openssl rand -hex 32"
        )
    return HealthSettings(address, int(text), token)


def listen(settings: HealthSettings) -> socket.socket:
    """Open the port; if it is in use, for instance by another job of the user on this node, open any free one.

    Raises:
        UsageError: The address belongs to another host, or only root may open the port.
    """
    try:
        return _open(settings.bind, settings.port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            logger.warning("health port %d is in use on this node; the agent takes a free one", settings.port)
        elif error.errno == errno.EACCES:
            raise UsageError(
                f"--health-port {settings.port}: only root may open ports below "
                f"{_unprivileged()}; give a higher one, or 0 for any free one"
            ) from None
        elif error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.EINVAL):
            raise UsageError(
                f"--health-bind {settings.bind}: no address of this node ({os.strerror(error.errno)}); "
                "give 0.0.0.0 for all addresses of this node"
            ) from None
        else:
            raise
    return _open(settings.bind, 0)


def _open(bind: str, port: int) -> socket.socket:
    address = ipaddress.ip_address(bind)
    if address.version == 4:
        return socket.create_server((bind, port), backlog=_BACKLOG)
    dual = address == ipaddress.IPv6Address("::") and socket.has_dualstack_ipv6()
    return socket.create_server((bind, port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=dual)


def _unprivileged() -> str:
    # ip(7), ip_unprivileged_port_start
    try:
        return Path("/proc/sys/net/ipv4/ip_unprivileged_port_start").read_text().strip()
    except OSError:
        return "1024"


def _read_token(path: Path) -> str:
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.read(1024)
    except OSError as error:
        raise UsageError(f"--health-token-file {path}: {error.strerror}; give a file that you can read") from None
    if mode & 0o077:
        raise UsageError(f"--health-token-file {path} is open to others (mode {mode & 0o777:04o}); chmod 600 it")
    return content.decode("latin-1").strip()


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of clients.

    Attributes:
        connections: Open connections of all clients; for one more, the server closes the one that waits longest for its
            client's request, or for its turn.
        requests_per_second: Requests of all clients; more have to wait, so that the training does not.
        probe_seconds: Seconds after which a request of `/healthz` on a connection is answered beside that number, so
            that no client makes the probe of another one fail.
        request_seconds: Seconds from the connection's beginning, or an answer, to the end of the next request.
        answer_seconds: Seconds in which the client has to read the answer, and to close.
    """

    connections: int = 64
    requests_per_second: int = 100
    probe_seconds: float = 0.5
    request_seconds: float = 5.0
    answer_seconds: float = 10.0


class HealthServer(HealthCheckServer):
    """Answers in a thread of its own, from `start` to `stop`, through all rounds.

    As in torch 2.13 (elastic/agent/server/health_check_server.py) the agent is alive if its last progress was less than
    `timeout` seconds ago.

    Args:
        alive_callback: Returns the time of the agent's last activity, in whole seconds since 1970 by this machine's
            clock.
        pages: The pages; None for liveness alone, at any path.
    """

    def __init__(
        self,
        alive_callback: Callable[[], int],
        listener: socket.socket,
        timeout: int,
        pages: NodePages | None = None,
        *,
        protected: bool,
        limits: Limits | None = None,
    ) -> None:
        self.port: int = listener.getsockname()[1]
        super().__init__(alive_callback, self.port, timeout)
        self._last_progress, self._longest_silence = alive_callback, timeout
        self.limits = limits or Limits()
        self.token: str | None = None
        """Token that clients have to send; None while there is none."""
        self._listener, self._pages, self._protected = listener, pages, protected
        self._connections: dict[asyncio.Task[None], bool] = {}
        """The tasks of open connections, newest requests last; True for one whose answer is made or read."""
        self._works = self._complained = False
        self._second, self._asked = 0.0, 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._main, name="slurm-elastic-health", daemon=True)

    def start(self) -> None:
        """Start the thread that answers."""
        self._loop = asyncio.new_event_loop()
        self._end = self._loop.create_future()
        self._thread.start()

    def stop(self) -> None:
        """Close the port and all connections. A second call does nothing."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        if self._thread.ident is None:
            self._listener.close()
            return
        self._loop.call_soon_threadsafe(self._end.set_result, None)
        self._thread.join(_STOP_TIMEOUT)

    # In the thread.

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = cast("asyncio.Task[None]", asyncio.current_task())
        self._connections[task] = False
        if len(self._connections) > self.limits.connections:
            # A client with many connections cannot lock out the next client.
            victim = next((other for other, busy in self._connections.items() if not busy), task)
            del self._connections[victim]
            victim.cancel()
        with contextlib.suppress(OSError, EOFError, asyncio.TimeoutError, asyncio.CancelledError):
            try:
                # With it, `drain` waits until the kernel has the whole answer.
                writer.transport.set_write_buffer_limits(high=0)
                await self._answer(task, reader, writer)
                await asyncio.wait_for(_end(reader, writer), self.limits.answer_seconds)
            finally:
                self._connections.pop(task, None)
                writer.transport.abort()

    async def _answer(
        self, task: asyncio.Task[None], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Answer the requests of a client; those of others come between any two of them."""
        probe_at, keep_open = 0.0, True
        while keep_open:
            try:
                head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), self.limits.request_seconds)
                request = read_request(head)
            except HTTPError as error:
                writer.write(Response(error.status, f"{error}\n".encode()).encode())
                return
            except asyncio.LimitOverrunError:
                status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
                writer.write(Response(status, f"more than {MAX_HEAD} bytes of headers\n".encode()).encode())
                return
            if request.path == LIVENESS and self._loop.time() >= probe_at:
                probe_at = self._loop.time() + self.limits.probe_seconds
            else:
                await self._turn()
            self._connections.pop(task, None)
            self._connections[task] = True
            answer = await self._page(request)
            keep_open = request.keep_open
            writer.write(answer.encode(keep_open=keep_open, head_only=request.method == "HEAD"))
            await asyncio.wait_for(writer.drain(), self.limits.answer_seconds)
            self._connections[task] = False
            await asyncio.sleep(0)

    async def _page(self, request: Request) -> Response:
        if self._pages is None:
            return liveness(*self._alive())
        try:
            answer = find(request, self._alive, self._pages, self.token, protected=self._protected)
            return await self._work(answer) if callable(answer) else answer
        except Exception:
            if not self._complained:
                self._complained = True
                logger.exception("the health port cannot answer (logged once): %s", request.path)
            return Response(HTTPStatus.INTERNAL_SERVER_ERROR, b"failed; see the agent's log\n")

    async def _turn(self) -> None:
        """Wait until one more request is answered in this second."""
        while True:
            now = self._loop.time()
            if now >= self._second + 1.0:
                self._second, self._asked = now, 0
            if self._asked < self.limits.requests_per_second:
                self._asked += 1
                return
            await asyncio.sleep(self._second + 1.0 - now)

    async def _work(self, make: Callable[[], Response]) -> Response:
        if self._works:
            return Response(
                HTTPStatus.SERVICE_UNAVAILABLE, b"busy with the same request of another client; ask again\n"
            )
        self._works = True
        try:
            return await run_in_thread(make)
        finally:
            self._works = False

    def _alive(self) -> tuple[bool, str]:
        silent = time.time() - self._last_progress()
        if silent < self._longest_silence:
            return True, "alive"
        return False, f"no activity for {silent:.0f} s"

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.set_exception_handler(self._note)
        try:
            self._loop.run_until_complete(self._serve())
        except Exception:
            logger.exception("the health port failed")
        finally:
            self._loop.close()
            self._listener.close()

    async def _serve(self) -> None:
        # asyncio (3.11, selector_events.py) takes one number for both. A client that finds no room waits for 1 s.
        server = await asyncio.start_server(self._client, sock=self._listener, backlog=_AT_ONCE, limit=MAX_HEAD)
        self._listener.listen(_BACKLOG)
        await self._end
        server.close()
        for task in (tasks := tuple(self._connections)):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _note(self, loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        # Such as no descriptor for one more client (asyncio, selector_events.py).
        if not self._complained:
            self._complained = True
            logger.warning("health port: %s (logged once): %s", context.get("message"), context.get("exception"))


def create_healthcheck_server(alive_callback: Callable[[], int], port: int, timeout: int) -> HealthCheckServer:
    """Make a server that answers with 200 while the agent is alive, else with 503; torch's function opens no port.

    Args:
        alive_callback: Returns the time of the agent's last progress, in whole seconds since 1970.
        port: A port of the loopback interface; 0, or one that is in use, for any free one.
    """
    return HealthServer(alive_callback, listen(HealthSettings(port=port)), timeout, protected=False)


async def _end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Read and drop what the client still sends.

    The kernel answers unread bytes by a reset, which would take the answer from the client (RFC 9112, 9.6).
    """
    writer.write_eof()
    while await reader.read(65536):
        pass


_SILENCE = 60
"""Seconds without activity after which the agent is not alive, as with torch's agent (local_elastic_agent.py, 2.13)."""


@contextlib.contextmanager
def health_port(settings: HealthSettings | None, run_dir: RunDir, state: AgentState) -> Iterator[NodePages]:
    """Keep the port open during a with block, and yield its pages, also where there is no port.

    A thread publishes the address in the run directory, in the format of Prometheus' file_sd_configs, reads the token's
    file, and removes the address at the end, because a shared file system may be slow.

    Raises:
        UsageError: See `listen`.
    """
    pages = NodePages(Reporter(state))
    try:
        if settings is None:
            yield pages
            return
        server = HealthServer(pages.last_progress, listen(settings), _SILENCE, pages, protected=settings.protected)
        server.start()
        over = threading.Event()
        thread = _start_thread(lambda: _publish(settings, run_dir, state, server, over))
        try:
            yield pages
        finally:
            over.set()
            thread.join(_STOP_TIMEOUT)
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
