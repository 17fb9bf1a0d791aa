"""Connections of agents to the leader, and to an endpoint whose name has several addresses."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Callable

from slurm_elastic.rendezvous.transport import messages
from slurm_elastic.rendezvous.transport.session import ForeignError, Session, SessionError

logger = logging.getLogger(__name__)

_HANDSHAKE_TIMEOUT = 10.0
"""Seconds. A leader to which many agents connect at once answers them in turn; an agent that gave up and connected
again would make all of them wait longer."""

_MAX_UNSENT = 8 << 20
"""Bytes that may be queued for another end that does not read."""
_READ = 16384
"""Bytes read at once; nearly all messages have a few hundred."""

_CONNECT_TIMEOUT = 1.0
"""Seconds for which the kernel tries one address. It repeats its SYN after 1, 3 and 7 s (tcp(7), tcp_syn_retries), so
an attempt that began while the network was cut waits for seconds after it is whole. A new attempt succeeds at once."""


class Connection:
    """One end of an authenticated connection; a subclass says what becomes of the bytes that come.

    It reads and writes its socket itself: docs/architecture.md has what a transport of asyncio costs.
    """

    def __init__(self, session: Session, stream: socket.socket) -> None:
        self.session, self._stream, self._descriptor = session, stream, stream.fileno()
        self._unsent = bytearray()
        self._closing = False
        self._loop = asyncio.get_running_loop()
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._loop.add_reader(self._descriptor, self._read)

    def _received(self, data: bytes) -> None:
        raise NotImplementedError

    def _ended(self) -> None:
        raise NotImplementedError

    def send(self, content: bytes) -> None:
        """Send one message. The connection ends instead if more than 8 MiB wait for the other end to read."""
        if self._closing:
            return
        if len(self._unsent) > _MAX_UNSENT:
            self.abort()
            return
        self._queue(self.session.seal(content))

    def close(self) -> None:
        """End the connection after all queued messages have been sent."""
        if not self._closing:
            self._closing = True
            self._loop.remove_reader(self._descriptor)
            if not self._unsent:
                self._loop.call_soon(self._lost)

    def abort(self) -> None:
        """End the connection at once."""
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
            # The other end has closed the connection, or its node is gone.
            self.abort()

    def _queue(self, data: bytes) -> None:
        """Send bytes after those that are queued."""
        if self._unsent:
            self._unsent += data
            return
        sent = self._send(data)
        if sent < len(data) and not self._closing:
            self._unsent += data[sent:]
            self._loop.add_writer(self._descriptor, self._write)

    def _send(self, data: bytes | bytearray) -> int:
        """Send the bytes that the kernel takes now, and return their number."""
        try:
            return self._stream.send(data)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:
            self.abort()
            return 0

    def _write(self) -> None:
        del self._unsent[: self._send(self._unsent)]
        if not self._unsent and self._descriptor >= 0:
            self._loop.remove_writer(self._descriptor)
            if self._closing:
                self._lost()

    def _lost(self) -> None:
        if self._descriptor >= 0:
            self._descriptor = -1
            self._stream.close()
            self._ended()


class Link(Connection):
    """The agent's end of a connection; the session proves whether the other end leads the run.

    Attributes:
        endpoint: Address and port of the other end.
        established: Done when both ends have proved that they belong to the run, or failed with the error.
    """

    def __init__(
        self,
        endpoint: messages.Endpoint,
        session: Session,
        stream: socket.socket,
        on_message: Callable[[Link, messages.LeaderMessage], None],
    ) -> None:
        super().__init__(session, stream)
        self.endpoint, self._on_message = endpoint, on_message
        self.established: asyncio.Future[None] = self._loop.create_future()
        self.closed: asyncio.Future[None] = self._loop.create_future()
        # The other end has to prove that it listens on this port, and does not pass on the proof of another listener.
        session.port = endpoint[1]
        self._queue(session.start())

    async def finish(self, timeout: float) -> None:
        """Send out what is buffered and end the connection."""
        self.close()
        await asyncio.wait([self.closed], timeout=timeout)

    def _received(self, data: bytes) -> None:
        try:
            contents, answer = self.session.receive(data)
        except SessionError as error:
            self._fail(error)
            self.abort()
            return
        if answer:
            self._queue(answer)
        if self.session.established and not self.established.done():
            self.established.set_result(None)
        for content in contents:
            try:
                message = messages.decode_leader_message(content)
            except messages.MessageError as error:
                logger.warning("dropped %s", error)
            else:
                self._on_message(self, message)

    def _ended(self) -> None:
        # The other end has proved nothing: a leader without room closes connections, too, and so does another program
        # that listens on the port of an agent that has ended.
        self._fail(ForeignError("something that closes the connection"))
        if not self.closed.done():
            self.closed.set_result(None)

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
    # The address replaces a name, since other agents know this endpoint by its address.
    stream, endpoint = await reach(endpoint)
    link = Link(endpoint, session, stream, on_message)
    try:
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
