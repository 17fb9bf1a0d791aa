"""The server behind the health port: torch's HealthCheckServer, with something in it."""

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

_BACKLOG = 64
_STOP_TIMEOUT = 2.0


class HealthServer(HealthCheckServer):
    """Answers in a thread of its own, from `start` to `stop`, through all rounds.

    As in torch 2.13 (elastic/agent/server/health_check_server.py) the agent is alive if its last progress was less than
    `timeout` seconds ago.

    Args:
        alive_callback: the time of the agent's last progress, in whole seconds since the epoch by this machine's clock.
        listener: bound, listening; closed at the end.
        timeout: seconds without progress after which the agent is taken for dead.
        pages: what to show.
        protected: whether it takes the token to see more than liveness.
        limits: for clients.
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
        """What clients have to show."""
        self._listener, self._pages, self._protected = listener, pages, protected
        self._connections: dict[Connection, None] = {}
        self._working: threading.Thread | None = None
        self._complained = False
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._main, name="slurm-elastic-health", daemon=True)

    def start(self) -> None:
        """Answer from now on."""
        self._loop = asyncio.new_event_loop()
        self._end = self._loop.create_future()
        self._thread.start()

    def stop(self) -> None:
        """Close the port and all connections. Called again, it does nothing."""
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

    # For the connections, in the loop.

    def opened(self, connection: Connection) -> None:
        """A client is there."""
        self._connections[connection] = None
        if len(self._connections) > self.limits.connections:
            # A stranger that holds many does not lock out whoever comes next.
            victim = next((one for one in self._connections if not one.busy or one.waits), connection)
            del self._connections[victim]
            victim.abort()

    def closed(self, connection: Connection) -> None:
        """A client is gone."""
        self._connections.pop(connection, None)

    def served(self, connection: Connection) -> None:
        """A client has asked something properly: it is the last to make room."""
        if self._connections.pop(connection, False) is None:
            self._connections[connection] = None

    def answer(self, request: Request) -> Response | Slow:
        """Answer a request."""
        try:
            return find(request, self._alive, self._pages, self.token, protected=self._protected)
        except Exception:
            return self._failed(request.path)

    def work(self, slow: Slow, done: Callable[[Response], None]) -> None:
        """Make an answer in a thread, one at a time."""
        if self._working is not None and self._working.is_alive():
            done(Response(HTTPStatus.SERVICE_UNAVAILABLE, b"busy with the same for somebody else; ask again\n"))
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
        return False, f"no sign of life for {silent:.0f} s"

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
        server = await self._loop.create_server(lambda: Connection(self), sock=self._listener, backlog=_BACKLOG)
        await self._end
        server.close()
        for connection in list(self._connections):
            connection.abort()
        # Lost connections are told so in the loop's next turn.
        await asyncio.sleep(0)

    def _note(self, loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        # Such as no descriptor for one more client (asyncio, selector_events.py).
        if not self._complained:
            self._complained = True
            logger.warning("health port: %s (logged once): %s", context.get("message"), context.get("exception"))
