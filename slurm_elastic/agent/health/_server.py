"""The server of the health port: a subclass of torch's HealthCheckServer."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Callable
from http import HTTPStatus

from torch.distributed.elastic.agent.server.health_check_server import HealthCheckServer

from slurm_elastic.agent.health._connection import Connection, Limits
from slurm_elastic.agent.health._http import Request, Response
from slurm_elastic.agent.health._routes import Pages, Refused, Slow, find

__all__ = ["HealthServer"]

logger = logging.getLogger("slurm_elastic")

_BACKLOG = 1024
_AT_ONCE = 16
"""Connections accepted in one turn of the loop: few beside those that are open, so that each is read before too many
newer ones are there."""
_STOP_TIMEOUT = 2.0


class HealthServer(HealthCheckServer):
    """Answers in a thread of its own, from `start` to `stop`, through all rounds.

    As in torch 2.13 (elastic/agent/server/health_check_server.py) the agent is alive if its last progress was less than
    `timeout` seconds ago.

    Args:
        alive_callback: Returns the time of the agent's last activity, in whole seconds since 1970 by this machine's
            clock.
        listener: Listening socket; the server closes it at the end.
        timeout: Seconds without activity after which the agent is not alive.
        pages: The pages.
        protected: True if all pages but liveness require the token.
        limits: Limits for clients.
    """

    def __init__(
        self,
        alive_callback: Callable[[], int],
        listener: socket.socket,
        timeout: int,
        pages: Pages,
        *,
        protected: bool,
        limits: Limits | None = None,
    ) -> None:
        self.port: int = listener.getsockname()[1]
        super().__init__(alive_callback, self.port, timeout)
        self._last_progress, self._longest_silence = alive_callback, timeout
        self.limits = limits or Limits()
        self.token: str | Refused = Refused("it is not read yet")
        """Token that clients have to send."""
        self._listener, self._pages, self._protected = listener, pages, protected
        self._connections: dict[Connection, None] = {}
        self._working: threading.Thread | None = None
        self._complained = False
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
        if self._working is not None:
            self._working.join(_STOP_TIMEOUT)

    # Called by connections, in the loop.

    def opened(self, connection: Connection) -> None:
        """Add a connection, and close another one if there are too many."""
        self._connections[connection] = None
        if len(self._connections) > self.limits.connections:
            # A client with many connections cannot lock out the next client.
            victim = next((one for one in self._connections if not one.busy or one.waits), connection)
            del self._connections[victim]
            victim.abort()

    def closed(self, connection: Connection) -> None:
        """Remove a connection."""
        self._connections.pop(connection, None)

    def served(self, connection: Connection) -> None:
        """Make a connection the last one to be closed for others, after a complete request."""
        if self._connections.pop(connection, False) is None:
            self._connections[connection] = None

    def count_request(self) -> None:
        """One more request."""
        self._asked += 1

    def full_until(self) -> float | None:
        """The loop's time until which no more requests are answered; None if one more is now."""
        now = self._loop.time()
        if now >= self._second + 1.0:
            self._second, self._asked = now, 0
        return None if self._asked < self.limits.requests_per_second else self._second + 1.0

    def answer(self, request: Request) -> Response | Slow:
        """Answer a request."""
        try:
            return find(request, self._alive, self._pages, self.token, protected=self._protected)
        except Exception:
            return self._failed(request.path)

    def work(self, slow: Slow, done: Callable[[Response], None]) -> None:
        """Make an answer in a thread, one at a time."""
        if self._working is not None and self._working.is_alive():
            done(Response(HTTPStatus.SERVICE_UNAVAILABLE, b"busy with the same request of another client; ask again\n"))
            return

        def make() -> None:
            try:
                response = slow.make()
            except Exception:
                response = self._failed("a slow answer")
            if not self._stopping.is_set():
                self._loop.call_soon_threadsafe(done, response)

        self._working = threading.Thread(target=make, name="slurm-elastic-health-work", daemon=True)
        self._working.start()

    def _alive(self) -> tuple[bool, str]:
        silent = time.time() - self._last_progress()
        if silent < self._longest_silence:
            return True, "alive"
        return False, f"no activity for {silent:.0f} s"

    def _failed(self, what: str) -> Response:
        if not self._complained:
            self._complained = True
            logger.exception("the health port cannot answer (logged once): %s", what)
        return Response(HTTPStatus.INTERNAL_SERVER_ERROR, b"failed; see the agent's log\n")

    # The thread.

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
        server = await self._loop.create_server(lambda: Connection(self), sock=self._listener, backlog=_AT_ONCE)
        # asyncio (3.11, selector_events.py) takes one number for both. A client that finds no room waits for 1 s.
        self._listener.listen(_BACKLOG)
        await self._end
        server.close()
        for connection in list(self._connections):
            connection.abort()
        # The loop calls connection_lost in its next turn.
        await asyncio.sleep(0)

    def _note(self, loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        # Such as no descriptor for one more client (asyncio, selector_events.py).
        if not self._complained:
            self._complained = True
            logger.warning("health port: %s (logged once): %s", context.get("message"), context.get("exception"))
