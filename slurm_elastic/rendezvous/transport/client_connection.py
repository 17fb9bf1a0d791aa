"""The agent's end of a connection to the leader."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from typing import Any, cast

from slurm_elastic.rendezvous.transport.connect import Endpoint, reach
from slurm_elastic.rendezvous.transport.messages import (
    AgentMessage,
    LeaderMessage,
    MessageError,
    decode_leader_message,
    encode,
)
from slurm_elastic.rendezvous.transport.session import BusyError, ClosedError, ForeignError, Session, SessionError

__all__ = ["BusyError", "ClosedError", "Link", "open_link"]

logger = logging.getLogger(__name__)

_HANDSHAKE_TIMEOUT = 10.0
"""Seconds. A leader to which many agents connect at once answers them in turn; an agent that gave up and connected
again would make all of them wait longer."""


class Link(asyncio.Protocol):
    """The agent's end of one connection; the session proves whether the other end leads the run.

    Attributes:
        endpoint: Address and port of the other end; a name is replaced by its address once connected.
        last_message_at: The loop's time at which the last bytes came.
        established: Done when both ends have proved that they belong to the run, or failed with the error.
        closed: Done when the connection has ended.
    """

    def __init__(
        self, endpoint: tuple[str, int], session: Session, on_message: Callable[[Link, LeaderMessage], None]
    ) -> None:
        loop = asyncio.get_running_loop()
        self.endpoint = endpoint
        self.last_message_at = loop.time()
        self.established: asyncio.Future[None] = loop.create_future()
        self.closed: asyncio.Future[None] = loop.create_future()
        self._session = session
        self._on_message = on_message
        self._loop = loop
        self._alarm: _Alarm | None = None

    @property
    def epoch(self) -> int:
        """The leader's epoch, known once the connection is established."""
        return self._session.epoch

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        self._transport = cast(asyncio.Transport, transport)
        stream = transport.get_extra_info("socket")
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # The other end has to prove that it listens on this port, and does not pass on the proof of another listener.
        self._session.port = int(transport.get_extra_info("peername")[1])
        self._transport.write(self._session.start())

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        self.last_message_at = self._loop.time()
        if self._alarm is not None:
            self._alarm.set(self.last_message_at)
        try:
            messages, answer = self._session.receive(data)
        except SessionError as error:
            self._fail(error)
            self._transport.abort()
            return
        if answer:
            self._transport.write(answer)
        if self._session.established and not self.established.done():
            self.established.set_result(None)
        for content in messages:
            self._receive(content)

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        # The other end has proved nothing: a leader without room closes connections, too, and so does another program
        # that listens on the port of an agent that has ended.
        self._fail(ForeignError("something that closes the connection"))
        if not self.closed.done():
            self.closed.set_result(None)

    def send(self, message: AgentMessage) -> None:
        """Send one message, unless the connection has ended."""
        if not self._transport.is_closing():
            self._transport.write(self._session.seal(encode(message)))

    def abort(self) -> None:
        """End the connection at once."""
        with contextlib.suppress(AttributeError):
            self._transport.abort()

    async def silent(self, seconds: float) -> None:
        """Return when no bytes have come for that many seconds, or the connection has ended.

        Each message defers the one timer, so an idle agent does not wake up in between.
        """
        self._alarm = _Alarm(self._loop, seconds)
        self._alarm.set(self.last_message_at)
        try:
            await asyncio.wait([self.closed, self._alarm.rung], return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._alarm.cancel()
            self._alarm = None

    async def finish(self, timeout: float) -> None:
        """Send out what is buffered and end the connection."""
        self._transport.close()
        await asyncio.wait([self.closed], timeout=timeout)

    def _receive(self, content: dict[str, Any]) -> None:
        try:
            message = decode_leader_message(content)
        except MessageError as error:
            logger.warning("dropped %s", error)
            return
        self._on_message(self, message)

    def _fail(self, error: SessionError) -> None:
        if not self.established.done():
            self.established.set_exception(error)
            # asyncio warns about an exception that is never retrieved, as that of an attempt that was given up.
            self.established.exception()


class _Alarm:
    """A future that is done when nothing has set it for some seconds."""

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        self.rung: asyncio.Future[None] = loop.create_future()
        self._loop, self._seconds = loop, seconds
        self._timer: asyncio.TimerHandle | None = None

    def set(self, moment: float) -> None:
        self.cancel()
        if not self.rung.done():
            self._timer = self._loop.call_at(moment + self._seconds, self.rung.set_result, None)

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


async def open_link(
    endpoint: Endpoint, session: Session, on_message: Callable[[Link, LeaderMessage], None], epoch: int
) -> Link:
    """Connect to a leader; both ends prove that they belong to the run.

    Args:
        endpoint: Where a leader may listen.
        session: This agent's end of a new session.
        on_message: Called with each message of the leader.
        epoch: The newest epoch that this agent knows; it does not follow a leader of an earlier one.

    Raises:
        ClosedError: An agent of this run listens there, and does not lead.
        ForeignError: Another program or run listens there, or a leader of an earlier epoch.
        BusyError: The leader of this run has no room for a connection now.
        VersionError: slurm_elastic of another protocol listens there.
        OSError: The connection was refused, or cannot be made.
        TimeoutError: No address accepted within 1 s, or the other end did not prove its identity within 10 s.
    """
    link = Link(endpoint, session, on_message)
    try:
        # The address replaces a name, since other agents know this endpoint by its address.
        _, _, link.endpoint = await reach(lambda: link, endpoint)
        await asyncio.wait_for(asyncio.shield(link.established), _HANDSHAKE_TIMEOUT)
        if link.epoch < epoch:
            raise ForeignError("a leader that another one has superseded")
    except BaseException:
        link.abort()
        raise
    return link
