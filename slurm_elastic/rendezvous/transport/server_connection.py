"""The leader's end of one connection."""

from __future__ import annotations

import asyncio
import socket
from typing import Any, Protocol, cast

from slurm_elastic.rendezvous.transport.session import Role, Session, SessionError, VersionError

__all__ = ["AcceptedConnection", "Host"]

_HANDSHAKE_TIMEOUT = 10.0
_MAX_UNSENT = 8 << 20
"""Bytes that may wait for one agent that does not read."""


class Host(Protocol):
    """Who is told what happens on a connection."""

    def opened(self, connection: AcceptedConnection) -> None:
        """A connection was made by somebody who has proved nothing yet."""

    def authenticated(self, connection: AcceptedConnection) -> None:
        """A connection has proved which agent it belongs to."""

    def received(self, connection: AcceptedConnection, content: dict[str, Any]) -> None:
        """An agent said something."""

    def reject(self, connection: AcceptedConnection, why: str) -> None:
        """Something was dropped."""

    def closed(self, connection: AcceptedConnection) -> None:
        """The connection has ended."""


class AcceptedConnection(asyncio.Protocol):
    """One accepted connection, of a stranger until it has proved to be an agent of this run."""

    def __init__(self, host: Host, secret: bytes, run: str, epoch: int) -> None:
        self._host = host
        self._session = Session(Role.LEADER, secret, run, epoch=epoch)
        self.agent = ""
        self.peer = "?"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        self._transport = cast(asyncio.Transport, transport)
        self.peer = str((transport.get_extra_info("peername") or ("?",))[0])
        stream = transport.get_extra_info("socket")
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._deadline = asyncio.get_running_loop().call_later(_HANDSHAKE_TIMEOUT, self._too_slow)
        self._host.opened(self)

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        try:
            messages, answer = self._session.receive(data)
        except SessionError as error:
            self._host.reject(self, str(error))
            if isinstance(error, VersionError):
                self._transport.write(error.answer)
            self.close()
            return
        if answer:
            self._transport.write(answer)
        if not self.agent and self._session.established:
            self._deadline.cancel()
            self.agent = self._session.agent
            self._host.authenticated(self)
        for message in messages:
            self._host.received(self, message)

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._deadline.cancel()
        self._host.closed(self)

    def send(self, content: bytes) -> None:
        """Send one message; an agent that has not read for too long is cut off."""
        if self._transport.is_closing():
            return
        if self._transport.get_write_buffer_size() > _MAX_UNSENT:
            self._transport.abort()
            return
        self._transport.write(self._session.seal(content))

    def close(self) -> None:
        """End the connection after what was sent has gone out."""
        self._transport.close()

    def _too_slow(self) -> None:
        self._host.reject(self, "a handshake that was never completed")
        self._transport.abort()
