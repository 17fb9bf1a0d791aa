"""The agent's end of a connection to the leader, and connections to an endpoint whose name has several addresses."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket
from collections.abc import Callable
from typing import Any, cast

from slurm_elastic.rendezvous.transport import messages
from slurm_elastic.rendezvous.transport.session import ForeignError, Session, SessionError

logger = logging.getLogger(__name__)

_HANDSHAKE_TIMEOUT = 10.0
"""Seconds. A leader to which many agents connect at once answers them in turn; an agent that gave up and connected
again would make all of them wait longer."""

_CONNECT_TIMEOUT = 1.0
"""Seconds for which the kernel tries one address. It repeats its SYN after 1, 3 and 7 s (tcp(7), tcp_syn_retries), so
an attempt that began while the network was cut waits for seconds after it is whole. A new attempt succeeds at once."""


class Link(asyncio.Protocol):
    """The agent's end of one connection; the session proves whether the other end leads the run.

    Attributes:
        endpoint: Address and port of the other end; a name is replaced by its address once connected.
        established: Done when both ends have proved that they belong to the run, or failed with the error.
    """

    def __init__(
        self, endpoint: messages.Endpoint, session: Session, on_message: Callable[[Link, messages.LeaderMessage], None]
    ) -> None:
        loop = asyncio.get_running_loop()
        self.endpoint = endpoint
        self.established: asyncio.Future[None] = loop.create_future()
        self.closed: asyncio.Future[None] = loop.create_future()
        self._session = session
        self._on_message = on_message

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
        try:
            contents, answer = self._session.receive(data)
        except SessionError as error:
            self._fail(error)
            self._transport.abort()
            return
        if answer:
            self._transport.write(answer)
        if self._session.established and not self.established.done():
            self.established.set_result(None)
        for content in contents:
            self._receive(content)

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        # The other end has proved nothing: a leader without room closes connections, too, and so does another program
        # that listens on the port of an agent that has ended.
        self._fail(ForeignError("something that closes the connection"))
        if not self.closed.done():
            self.closed.set_result(None)

    def send(self, message: messages.AgentMessage) -> None:
        """Send one message, unless the connection has ended."""
        if not self._transport.is_closing():
            self._transport.write(self._session.seal(messages.encode(message)))

    def abort(self) -> None:
        """End the connection at once."""
        with contextlib.suppress(AttributeError):
            self._transport.abort()

    async def finish(self, timeout: float) -> None:
        """Send out what is buffered and end the connection."""
        self._transport.close()
        await asyncio.wait([self.closed], timeout=timeout)

    def _receive(self, content: dict[str, Any]) -> None:
        try:
            message = messages.decode_leader_message(content)
        except messages.MessageError as error:
            logger.warning("dropped %s", error)
            return
        self._on_message(self, message)

    def _fail(self, error: SessionError) -> None:
        if not self.established.done():
            self.established.set_exception(error)
            # asyncio warns about an exception that is never retrieved, as that of an attempt that was given up.
            self.established.exception()


async def open_link(
    endpoint: messages.Endpoint, session: Session, on_message: Callable[[Link, messages.LeaderMessage], None]
) -> Link:
    """Connect to a leader; both ends prove that they belong to the run.

    Raises:
        ClosedError: An agent of this run listens there, and does not lead.
        ForeignError: Another program or run listens there.
        BusyError: The leader of this run has no room for a connection now.
        VersionError: slurm_elastic of another protocol listens there.
        OSError: The connection was refused, or cannot be made.
        TimeoutError: No address accepted within 1 s, or the other end did not prove its identity within 10 s.
    """
    link = Link(endpoint, session, on_message)
    try:
        # The address replaces a name, since other agents know this endpoint by its address.
        stream, link.endpoint = await reach(endpoint)
        await asyncio.get_running_loop().create_connection(lambda: link, sock=stream)
        await asyncio.wait_for(asyncio.shield(link.established), _HANDSHAKE_TIMEOUT)
    except BaseException:
        link.abort()
        raise
    return link


async def reach(endpoint: messages.Endpoint) -> tuple[socket.socket, messages.Endpoint]:
    """Connect to the first address of an endpoint that accepts; return the socket, and that address and port.

    asyncio (3.11, base_events.py, create_connection) makes one OSError of the errors of several addresses, whatever
    they were. Most names have several: each line of /etc/hosts counts for IPv6 too, as a mapped address.

    Raises:
        ConnectionRefusedError: All addresses refuse, so no process listens there.
        TimeoutError: asyncio's; an address did not answer within 1 s.
        OSError: Another error of an address, or of the name.
    """
    errors: list[Exception] = []
    for address in await _addresses(endpoint):
        try:
            return await _connected(address, endpoint[1]), (address, endpoint[1])
        except (OSError, asyncio.TimeoutError) as error:
            errors.append(error)
    raise next((error for error in errors if not isinstance(error, ConnectionRefusedError)), errors[0])


async def _connected(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    stream = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        try:
            await asyncio.wait_for(asyncio.get_running_loop().sock_connect(stream, (address, port)), _CONNECT_TIMEOUT)
        except asyncio.TimeoutError:
            # The kernel may have connected while this process waited for a processor; a new attempt would wait again.
            try:
                stream.getpeername()
            except OSError:
                raise asyncio.TimeoutError from None
    except BaseException:
        stream.close()
        raise
    return stream


async def _addresses(endpoint: messages.Endpoint) -> list[str]:
    host, port = endpoint
    try:
        ipaddress.ip_address(host)
    except ValueError:
        infos = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return list(dict.fromkeys(_plain(str(info[4][0])) for info in infos))
    return [host]


def _plain(address: str) -> str:
    parsed = ipaddress.ip_address(address)
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return str(mapped or address)
