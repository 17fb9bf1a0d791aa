"""One connection from an agent to what should be the leader."""

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
"""Seconds. A leader that many come to at once answers them in turn; whoever gave up and came again would only make the
others wait longer, and itself."""


class Link(asyncio.Protocol):
    """One connection to what should be the leader.

    Attributes:
        endpoint: of the other side; by address once connected.
        heard_at: the loop's time at which it was heard last.
        established: done when both sides have proved that they belong to the run.
        closed: done when the connection has ended.
    """

    def __init__(
        self, endpoint: tuple[str, int], session: Session, heard: Callable[[Link, LeaderMessage], None]
    ) -> None:
        loop = asyncio.get_running_loop()
        self.endpoint = endpoint
        self.heard_at = loop.time()
        self.established: asyncio.Future[None] = loop.create_future()
        self.closed: asyncio.Future[None] = loop.create_future()
        self._session = session
        self._heard = heard
        self._loop = loop
        self._alarm: _Alarm | None = None

    @property
    def epoch(self) -> int:
        """The epoch that the other side leads in, or would; known once established."""
        return self._session.epoch

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        self._transport = cast(asyncio.Transport, transport)
        stream = transport.get_extra_info("socket")
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # The other side has to prove that it listens there, and does not pass on what another one says.
        self._session.port = int(transport.get_extra_info("peername")[1])
        self._transport.write(self._session.start())

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        self.heard_at = self._loop.time()
        if self._alarm is not None:
            self._alarm.set(self.heard_at)
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
        # It has proved nothing: a leader without room may do so, or another program on the port of an agent that ended.
        self._fail(ForeignError("something that closes the connection"))
        if not self.closed.done():
            self.closed.set_result(None)

    def send(self, message: AgentMessage) -> None:
        """Send one message, if the connection still stands."""
        if not self._transport.is_closing():
            self._transport.write(self._session.seal(encode(message)))

    def abort(self) -> None:
        """End the connection at once."""
        with contextlib.suppress(AttributeError):
            self._transport.abort()

    async def silent(self, seconds: float) -> None:
        """Return when nothing was heard for so long, or the connection has ended.

        Whatever is heard puts the alarm off, so an agent that is idle has no wake-ups of its own.
        """
        self._alarm = _Alarm(self._loop, seconds)
        self._alarm.set(self.heard_at)
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
        self._heard(self, message)

    def _fail(self, error: SessionError) -> None:
        if not self.established.done():
            self.established.set_exception(error)
            self.established.exception()  # asked for once, so that an attempt given up leaves no warning behind


class _Alarm:
    """Rings when it was not set for some seconds."""

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
    endpoint: Endpoint, session: Session, heard: Callable[[Link, LeaderMessage], None], epoch: int
) -> Link:
    """Connect, and prove to each other whose this run is.

    Args:
        endpoint: where a leader may be.
        session: new, of this agent.
        heard: told what the leader says.
        epoch: a leader of an earlier one does not count.

    Raises:
        ClosedError: an agent of this run that leads nobody.
        ForeignError: it does not lead this run, or not any more.
        BusyError: it leads this run, and has no room now.
        VersionError: it speaks another protocol.
        OSError: nobody listens, or nobody answers.
        TimeoutError: it takes too long.
    """
    link = Link(endpoint, session, heard)
    try:
        # One that was found by name is to be known by its address, as the others know it.
        _, _, link.endpoint = await reach(lambda: link, endpoint)
        await asyncio.wait_for(asyncio.shield(link.established), _HANDSHAKE_TIMEOUT)
        if link.epoch < epoch:
            raise ForeignError("a leader that has been followed by another")
    except BaseException:
        link.abort()
        raise
    return link
