"""The leader's end of one connection."""

from __future__ import annotations

import asyncio
import socket
from typing import Any, Protocol

from slurm_elastic.rendezvous.transport.listener import AdmittedConnection
from slurm_elastic.rendezvous.transport.session import SessionError

_HANDSHAKE_TIMEOUT = 20.0
"""Seconds in which a member of the run has to prove its identity; it gives up earlier itself (client_connection.py)."""
_MAX_UNSENT = 8 << 20
"""Bytes that may be queued for an agent that does not read."""
_READ = 16384
"""Bytes read at once; nearly all messages of agents have a few hundred."""


class Host(Protocol):
    """The receiver of what happens on a connection."""

    def opened(self, connection: AcceptedConnection) -> None:
        """A member of the run has connected, and has not proved yet which agent it is."""

    def authenticated(self, connection: AcceptedConnection) -> None:
        """The other end has proved which agent it is."""

    def received(self, connection: AcceptedConnection, content: dict[str, Any]) -> None:
        """An agent has sent a message."""

    def reject(self, peer: str, why: str) -> None:
        """Something from an address was dropped; `why` names it."""

    def closed(self, connection: AcceptedConnection) -> None:
        """The connection has ended."""


class AcceptedConnection:
    """The listening end of a connection of a member of the run.

    It reads and writes its socket itself. A transport of asyncio (3.11) costs a task for each connection, and a buffer
    of 256 KiB for each read (selector_events.py, max_size), however few bytes come.

    Args:
        host: Told what happens on the connection.
        admitted: The connection, as the listener has admitted it.
        stream: Its socket, which this object closes.

    Attributes:
        named: The agent that the greeting names.
        agent: The agent that the other end has proved to be, empty before.
        peer: Address of the other end, for logs.
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
        """Send one message. The connection ends instead if more than 8 MiB wait for the agent to read."""
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
        """End the connection after all queued messages have been sent."""
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
        """Send the bytes that the kernel takes now, and return their number."""
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
