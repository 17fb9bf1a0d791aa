"""The leader's end of one connection."""

from __future__ import annotations

import asyncio
import socket
from typing import Any, Protocol, cast

from slurm_elastic.rendezvous.transport.listener import AdmittedConnection
from slurm_elastic.rendezvous.transport.session import SessionError

__all__ = ["AcceptedConnection", "Host"]

_HANDSHAKE_TIMEOUT = 20.0
"""Seconds that a member of the run may take to prove who it is; longer than it waits itself."""
_MAX_UNSENT = 8 << 20
"""Bytes that may wait for one agent that does not read."""


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


class AcceptedConnection(asyncio.Protocol):
    """One connection of a member of the run.

    Attributes:
        named: the agent that it says it belongs to.
        agent: the agent that it has proved to belong to, empty before.
        peer: address of the other side, for people.
    """

    def __init__(self, host: Host, admitted: AdmittedConnection) -> None:
        self._host = host
        self._session = admitted.session
        self.named = admitted.session.agent
        self.agent = ""
        self.peer = admitted.peer

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        self._transport = cast(asyncio.Transport, transport)
        stream = transport.get_extra_info("socket")
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._deadline = asyncio.get_running_loop().call_later(_HANDSHAKE_TIMEOUT, self._too_slow)
        self._host.opened(self)

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        try:
            messages, _ = self._session.receive(data)
        except SessionError as error:
            self._host.reject(self.peer, str(error))
            self.close()
            return
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
        self._host.reject(self.peer, "a handshake that was never completed")
        self._transport.abort()
