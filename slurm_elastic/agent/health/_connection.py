"""A connection to the health port, whose client may be slow, wrong or hostile. It runs in the server's loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, cast

from slurm_elastic.agent.health._http import HTTPError, Request, Response, next_request
from slurm_elastic.agent.health._routes import LIVENESS, Slow

__all__ = ["Connection", "Limits", "Server"]

_TURN = 16
"""Requests of one client that the server answers before it serves other clients."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a client.

    Attributes:
        connections: Open connections of all clients; for one more, the server closes the one that was silent longest.
        requests_per_second: Requests of all clients, as a client that connects again is another one; more have to wait,
            so that the training does not.
        probes_per_second: Requests of `/healthz` on one connection that are answered beside that number, so that no
            client makes the probe of another one fail.
        request_seconds: Seconds from the first byte of a request, or from the connection's beginning, to its end.
        idle_seconds: Seconds between two requests.
        answer_seconds: Seconds in which the client has to read an answer, and to close after the last one.
    """

    connections: int = 64
    requests_per_second: int = 100
    probes_per_second: int = 2
    request_seconds: float = 5.0
    idle_seconds: float = 75.0
    answer_seconds: float = 10.0


class Server(Protocol):
    """The methods of the server that a connection calls."""

    limits: Limits

    def opened(self, connection: Connection) -> None:
        """Add a connection."""

    def closed(self, connection: Connection) -> None:
        """Remove a connection."""

    def served(self, connection: Connection) -> None:
        """Note a complete request of a client."""

    def count_request(self) -> None:
        """One more request."""

    def full_until(self) -> float | None:
        """The loop's time until which no more requests are answered; None if one more is now."""

    def answer(self, request: Request) -> Response | Slow:
        """Answer a request."""

    def work(self, slow: Slow, done: Callable[[Response], None]) -> None:
        """Make a slow answer in another thread, and call `done` in the loop."""


class Connection(asyncio.Protocol):
    """A connection; see asyncio.Protocol for the meaning of its callbacks."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._received = bytearray()
        self._timer: asyncio.TimerHandle | None = None
        self._by = float("inf")
        self._full = self._said_all = self._ending = False
        self._request: Request | None = None
        """The request that has to wait."""
        self._second, self._probes = 0.0, 0
        self.busy = False
        """True while an answer is made or read, or the client has to wait."""
        self.waits = False
        """True while the client has to wait because of too many requests."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start to read."""
        self._transport = cast(asyncio.Transport, transport)
        # When the kernel cannot take data at once, this stops reading until it can.
        self._transport.set_write_buffer_limits(high=0)
        self._expect(self._server.limits.request_seconds)
        self._server.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove the connection."""
        if self._timer is not None:
            self._timer.cancel()
        self._server.closed(self)

    def data_received(self, data: bytes) -> None:
        """Read a part of a request."""
        if self._ending:
            return
        if not self._received and not self.busy:
            self._expect(self._server.limits.request_seconds)
        self._received += data
        if not self.busy:
            self._serve()

    def eof_received(self) -> bool:
        """Answer the requests that came before the end of the client's data."""
        self._said_all = True
        return self.busy

    def pause_writing(self) -> None:
        """Limit the time in which the client has to read its answers."""
        self._full = True
        self._pause()
        self._expect(self._server.limits.answer_seconds)

    def resume_writing(self) -> None:
        """Continue after the client has read its answers."""
        self._full = False
        self._resume()

    def abort(self) -> None:
        """Close the connection at once."""
        self._transport.abort()

    def _serve(self) -> None:
        for _ in range(_TURN):
            if self.busy or self._ending or self._transport.is_closing():
                return
            try:
                request = self._request or next_request(self._received)
            except HTTPError as error:
                self._send(Response(error.status, f"{error}\n".encode()), keep_open=False)
                return
            if request is None:
                if self._said_all:
                    self._transport.close()
                elif not self._received:
                    self._expect(self._server.limits.idle_seconds)
                return
            self._request = request
            if not self._is_probe(request):
                if self._too_many():
                    return
                self._server.count_request()
            self._request = None
            self._server.served(self)
            self._expect(self._server.limits.request_seconds)
            answer = self._server.answer(request)
            if isinstance(answer, Slow):
                self._wait_for(answer, request)
            else:
                self._send(answer, keep_open=request.keep_open, head_only=request.method == "HEAD")
        if not self.busy:
            self._pause()
            self._loop.call_soon(self._resume)

    def _is_probe(self, request: Request) -> bool:
        """Return True for a request of the agent's liveness that does not count among those of all clients."""
        if request.path != LIVENESS:
            return False
        now = self._loop.time()
        if now >= self._second + 1.0:
            self._second, self._probes = now, 0
        self._probes += 1
        return self._probes <= self._server.limits.probes_per_second

    def _too_many(self) -> bool:
        again_at = self._server.full_until()
        if again_at is None:
            return False
        self._pause()
        self._expect(None)
        self.waits = True
        self._loop.call_at(again_at, self._resume)
        return True

    def _wait_for(self, answer: Slow, request: Request) -> None:
        self._pause()
        self._expect(None)

        def done(response: Response) -> None:
            if not self._transport.is_closing():
                self._send(response, keep_open=request.keep_open, head_only=request.method == "HEAD")
                self._resume()

        self._server.work(answer, done)

    def _send(self, response: Response, *, keep_open: bool, head_only: bool = False) -> None:
        self._transport.write(response.encode(keep_open=keep_open, head_only=head_only))
        if not keep_open:
            # What the client still sends is read and dropped: the kernel answers unread bytes by a reset, which would
            # take the answer from the client (RFC 9112, 9.6).
            self._ending = True
            self._received.clear()
            self._transport.write_eof()
            self._expect(self._server.limits.answer_seconds)

    def _pause(self) -> None:
        self.busy = True
        self._transport.pause_reading()

    def _resume(self) -> None:
        if self._full or self._transport.is_closing():
            return
        self.busy = self.waits = False
        self._transport.resume_reading()
        if not self._ending:
            self._expect(self._server.limits.request_seconds)
            self._serve()

    def _expect(self, seconds: float | None) -> None:
        """Limit the client's time to a number of seconds from now; None for no limit."""
        self._by = float("inf") if seconds is None else self._loop.time() + seconds
        if self._timer is not None and self._timer.when() > self._by:
            self._timer.cancel()
            self._timer = None
        if self._timer is None and seconds is not None:
            self._timer = self._loop.call_at(self._by, self._look)

    def _look(self) -> None:
        self._timer = None
        if self._loop.time() >= self._by:
            self.abort()
        elif self._by != float("inf"):
            self._timer = self._loop.call_at(self._by, self._look)
