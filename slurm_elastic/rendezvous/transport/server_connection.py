"""The leader's end of one connection."""

from __future__ import annotations

import asyncio
import socket
from typing import Any, Protocol

from slurm_elastic.rendezvous.transport.listener import AdmittedConnection
from slurm_elastic.rendezvous.transport.session import SessionError

__all__ = ["AcceptedConnection", "Host"]

_HANDSHAKE_TIMEOUT = 20.0
"""Seconds that a member of the run may take to prove who it is; longer than it waits itself."""
_MAX_UNSENT = 8 << 20
"""Bytes that may wait for one agent that does not read."""
_READ = 16384
"""Bytes read at once; nearly all that agents say has a few hundred."""


class Host(Protocol):
    """The receiver of what happens on a connection."""

    def opened(self, connection: AcceptedConnection) -> None:
        """A connection was made by a member of the run, which has not proved yet which one it is."""

    def authenticated(self, connection: AcceptedConnection) -> None:
        """A connection has proved which agent it belongs to."""

    def received(self, connection: AcceptedConnection, content: dict[str, Any]) -> None:
        """An agent said something."""

    def reject(self, peer: str, why: str) -> None:
        """Something from this address was dropped."""

    def closed(self, connection: AcceptedConnection) -> None:
        """The connection has ended."""


class AcceptedConnection:
    """One connection of a member of the run, which is in one of these.

    It reads and writes its socket itself. A transport of asyncio (3.11) costs a task for each connection, and a buffer
    of 256 KiB for each read (selector_events.py, max_size), however little was said.

    Attributes:
        named: the agent that it says it belongs to.
        agent: the agent that it has proved to belong to, empty before.
        peer: address of the other side, for people.
    """

    def __init__(self, host: Host, admitted: AdmittedConnection, stream: socket.socket) -> None:
        self._host = host
        self._session = admitted.session
        self.named = admitted.session.agent
        self.agent = ""
        self.peer = admitted.peer
        self._stream, self._descriptor = stream, stream.fileno()
        self._unsent = bytearray()
        self._closing = False
        self._loop = asyncio.get_running_loop()
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._loop.add_reader(self._descriptor, self._read)
        self._deadline: asyncio.TimerHandle | None = self._loop.call_later(_HANDSHAKE_TIMEOUT, self._too_slow)
        host.opened(self)

    def send(self, content: bytes) -> None:
        """Send one message; an agent that has not read for too long is cut off."""
        if self._closing:
            return
        if len(self._unsent) > _MAX_UNSENT:
            self._abort()
            return
        data = self._session.seal(content)
        if self._unsent:
            self._unsent += data
            return
        sent = self._send(data)
        if sent < len(data) and not self._closing:
            self._unsent += data[sent:]
            self._loop.add_writer(self._descriptor, self._write)

    def close(self) -> None:
        """End the connection after what was sent has gone out."""
        if not self._closing:
            self._closing = True
            self._loop.remove_reader(self._descriptor)
            if not self._unsent:
                self._loop.call_soon(self._lost)

    def _abort(self) -> None:
        if self._unsent:
            self._unsent.clear()
            self._loop.remove_writer(self._descriptor)
            if self._closing:
                self._loop.call_soon(self._lost)
        self.close()

    def _read(self) -> None:
        try:
            data = self._stream.recv(_READ)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if data:
            self._received(data)
        else:
            # The agent has closed its end, or its node is gone.
            self._abort()

    def _received(self, data: bytes) -> None:
        try:
            messages, _ = self._session.receive(data)
        except SessionError as error:
            self._host.reject(self.peer, str(error))
            self.close()
            return
        if not self.agent and self._session.established:
            self._in_time()
            self.agent = self._session.agent
            self._host.authenticated(self)
        for message in messages:
            self._host.received(self, message)

    def _send(self, data: bytes | bytearray) -> int:
        """Send what the kernel takes now; how much that is."""
        try:
            return self._stream.send(data)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:
            self._abort()
            return 0

    def _write(self) -> None:
        del self._unsent[: self._send(self._unsent)]
        if not self._unsent and self._descriptor >= 0:
            self._loop.remove_writer(self._descriptor)
            if self._closing:
                self._lost()

    def _lost(self) -> None:
        if self._descriptor < 0:
            return
        self._descriptor = -1
        self._in_time()
        self._stream.close()
        self._host.closed(self)

    def _in_time(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_slow(self) -> None:
        self._host.reject(self.peer, "a handshake that was never completed")
        self._abort()
