"""A snapshot from one agent to another: authenticated by the session that agents and leader use, length-checked.

After the handshake: the receiver asks for a snapshot or a part of one, the sender answers with its size, the receiver
says that it is ready, the sender sends that many bytes and then their digest. Only the digest is authenticated by the
session: bytes that were changed on the way do not match it, and are never committed. They are not encrypted. The digest
is BLAKE3: hashlib's take several times as long, which on both sides would be more than the rest of the transfer.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
from blake3 import blake3

from slurm_elastic import typed_json
from slurm_elastic.rendezvous.transport.session import Role, Session, SessionError
from slurm_elastic.snapshot.lineage import Copy, Holder
from slurm_elastic.snapshot.memory import HEADER, Contents, Slot, check_memory
from slurm_elastic.snapshot.sharding import Ranges

logger = logging.getLogger("slurm_elastic")

_TIMEOUT = 10.0
"""Seconds without a byte after which the other side is given up."""
_GIVE_UP = 60.0
"""Seconds after which no holder is asked again."""
_CHUNK = 1 << 22
"""Bytes that are sent, or received at most, at a time."""
_UNSENT = 1 << 18
"""Bytes that the kernel keeps beyond those that are on their way."""
_SIOCOUTQ = 0x5411
"""Asks for the bytes that are not acknowledged yet (asm-generic/ioctls.h, x86-64 and arm64 Linux)."""
_BUFFER = 1 << 20
"""Bytes that are received before they are written: few enough to stay in the caches of a processor."""
_STRANGERS = 64
"""Connections that have not proved the secret; a further one takes the place of the oldest."""


class TransferError(Exception):
    """A snapshot does not come from another agent."""


class Settings(msgspec.Struct, frozen=True):
    """The identity of an agent of an incarnation.

    After `silence` seconds without a byte the end of what another agent sends is not waited for.
    """

    secret: bytes
    run: str
    agent: str
    node: str
    address: str
    silence: float = 1.0
    domain: str = ""


class Request(msgspec.Struct, frozen=True, tag=True):
    """A request for a snapshot or a part; the answer is its `Contents`, then bytes, and their `Digest`.

    The bytes are sent when the receiver is `Ready`. `ranges` say where the bytes of the shards begin and end that are
    needed; the others stay zero. None for all.
    """

    copy: Copy
    ranges: Ranges | None = None


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The answer that bytes can come, or, with `copied`, that the receiver has them."""

    copied: bool = False


class Digest(msgspec.Struct, frozen=True, tag=True):
    """The digest of bytes that were sent."""

    digest: str


class Server:
    """The port at which an agent serves the other agents of its run.

    `attend` has the channel of each that has proved the secret, in a thread of its own.
    """

    def __init__(self, settings: Settings, attend: Callable[[Channel], None]) -> None:
        self._settings, self._attend = settings, attend
        self._strangers: dict[socket.socket, None] = {}
        self._members: dict[socket.socket, None] = {}
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        self._listener = socket.create_server(("", 0), family=family, dualstack_ipv6=dual)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._serve, name="slurm-elastic-snapshot-server", daemon=True).start()

    def close(self) -> None:
        """Accept no more agents, and end all connections."""
        for open_socket in (self._listener, *list(self._members)):
            shut_down(open_socket)
        self._listener.close()

    def _serve(self) -> None:
        for connection in accepted(self._listener):
            if len(self._strangers) >= _STRANGERS and (oldest := next(iter(list(self._strangers)), None)) is not None:
                # Other threads take some away meanwhile.
                self._strangers.pop(oldest, None)
                # Its thread closes it. If it has just proved the secret, it comes again.
                shut_down(oldest)
            self._strangers[connection] = None
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        try:
            with connection:
                try:
                    session = Session(Role.LEADER, self._settings.secret, _session_name(self._settings), port=self.port)
                    channel = Channel(connection, session)
                    self._members[connection] = None
                finally:
                    self._strangers.pop(connection, None)
                self._attend(channel)
        except (OSError, SessionError, TransferError) as error:
            logger.debug("a connection of another agent ends: %s", error)
        finally:
            self._members.pop(connection, None)


def shut_down(connection: socket.socket) -> None:
    """Have all threads that use a connection or listener return from that."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def accepted(listener: socket.socket) -> Iterator[socket.socket]:
    """Yield the connections of a listener until it is shut down."""
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        yield connection


def send_requested(channel: Channel, request: Request, slots: Sequence[Slot]) -> None:
    """Send a snapshot or a part that one of the slots holds; raises as `Channel.send_body`, TransferError if none."""
    for slot in slots:
        contents = slot.contents()
        if contents is None or contents.copy != request.copy:
            continue
        bodies = bodies_of(contents, request.ranges)
        channel.say(contents)
        channel.next(Ready)
        channel.send_body(slot, contents, bodies)
        return
    raise TransferError(f"{request.copy} is not here any more")


def connect(holder: Holder, settings: Settings, timeout: float = _TIMEOUT) -> Channel:
    """Open a session with another agent; raises OSError, SessionError or TransferError.

    `timeout` is for the connection, and for each call of the channel afterwards.
    """
    connection = socket.create_connection((holder.address, holder.port), timeout=timeout)
    try:
        session = Session(Role.AGENT, settings.secret, _session_name(settings), agent=settings.agent, port=holder.port)
        channel = Channel(connection, session)
        connection.settimeout(timeout)
        return channel
    except BaseException:
        connection.close()
        raise


def _session_name(settings: Settings) -> str:
    # No proof of such a session is good for one with the leader.
    return f"{settings.run} snapshot"


def receive(
    request: Request, slot: Slot, holders: Sequence[Holder], settings: Settings, cancelled: Callable[[], bool]
) -> None:
    """Get a snapshot, or a part of one, into a slot, from one of the agents that hold it.

    Args:
        holders: To ask, again and again, beginning with one that depends on this agent.
        cancelled: Asked all the time: True if the snapshot is not wanted any more.

    Raises:
        TransferError: No holder sends it.
        OutOfMemoryError: The memory of the node or job does not suffice.
    """
    give_up, why = time.monotonic() + _GIVE_UP, "no agent holds it"
    # Agents that come together ask different ones first.
    turn = zlib.crc32(settings.agent.encode()) % max(1, len(holders))
    while holders and not cancelled():
        for holder in (*holders[turn:], *holders[:turn]):
            try:
                channel = connect(holder, settings)
                with channel.socket:
                    _receive(channel, request, slot, cancelled)
                return
            except (OSError, SessionError, TransferError) as error:
                why = f"{holder.address}: {error or type(error).__name__}"
            if cancelled():
                break
        if time.monotonic() > give_up:
            break
        time.sleep(0.2)
    raise TransferError("not wanted any more" if cancelled() else why)


def _receive(channel: Channel, request: Request, slot: Slot, cancelled: Callable[[], bool]) -> None:
    channel.say(request)
    contents = channel.next(Contents)
    if contents.copy != request.copy or not contents.is_possible:
        raise TransferError("an answer without sizes")
    bodies = bodies_of(contents, request.ranges)
    check_memory(sum(end - begin for begin, end in bodies))

    def require_wanted() -> None:
        if cancelled():
            raise TransferError("not wanted any more")

    channel.receive_body(slot, contents, bodies, require_wanted)


class Channel:
    """A connection whose handshake is done by blocking calls, its messages, and the bytes of snapshots.

    The timeout of the socket is for each call the time without any progress: a slow link takes as long as it takes.
    """

    def __init__(self, connection: socket.socket, session: Session) -> None:
        self.socket, self._session = connection, session
        self._messages: list[dict[str, Any]] = []
        connection.settimeout(_TIMEOUT)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Else the kernel takes megabytes, and says for seconds nothing of what has left.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT)
        connection.sendall(session.start())
        while not session.established:
            self._read()

    def say(self, message: object) -> None:
        """Send a message."""
        self.socket.sendall(self._session.seal(msgspec.json.encode(message)))

    def next(self, kind: Any) -> Any:
        """Wait for the next message, and return it; raises TransferError if it is not of this type."""
        while not self._messages:
            self._read()
        try:
            return typed_json.convert(self._messages.pop(0), kind)
        except typed_json.JSONError as error:
            raise TransferError(f"another message than {kind}: {error}") from None

    def send_body(self, slot: Slot, contents: Contents, bodies: Ranges) -> None:
        """Send bytes of a snapshot, see `bodies_of`, and their digest; raises TransferError if it is overwritten."""
        digest, memory = blake3(), slot.memory()[HEADER : contents.size]
        for begin, end in bodies:
            for start in range(begin, end, _CHUNK):
                chunk = memory[start : min(start + _CHUNK, end)]
                digest.update(chunk)
                while len(chunk):
                    # Not sendall, whose timeout is that of all bytes together (Lib/socket, 3.11).
                    chunk = chunk[self.socket.send(chunk) :]
        # A worker that overwrites the slot clears the header first. Then the receiver has to look elsewhere.
        if slot.contents() != contents:
            raise TransferError("overwritten meanwhile")
        self.say(Digest(digest.hexdigest()))

    def receive_body(self, slot: Slot, contents: Contents, bodies: Ranges, heard: Callable[[], None]) -> None:
        """Fill a slot with bytes of a snapshot, see `bodies_of`, and compare their digest; calls `heard` as they come.

        Raises OSError, SessionError or TransferError if they do not come whole, OutOfMemoryError if there is no memory,
        and what `heard` raises; then the slot holds nothing.
        """
        digest, buffer = blake3(), memoryview(bytearray(_BUFFER))

        def write() -> None:
            self.say(Ready())
            for begin, end in bodies:
                for start in range(begin, end, _BUFFER):
                    block = buffer[: end - start]
                    missing = block
                    while len(missing):
                        count = self.socket.recv_into(missing)
                        if not count:
                            raise TransferError("it ends in the middle")
                        missing = missing[count:]
                        heard()
                    digest.update(block)
                    slot.put(HEADER + start, block)
            if self.next(Digest).digest != digest.hexdigest():
                raise TransferError("a wrong digest")

        slot.fill(contents, write)

    def _read(self) -> None:
        # Never more than the bytes of messages: what follows one may be a snapshot, which begins when it is asked for.
        received = self._next_bytes(4096)
        if not received:
            raise TransferError("the connection ends")
        messages, answer = self._session.receive(received)
        self._messages += messages
        if answer:
            self.socket.sendall(answer)

    def _next_bytes(self, size: int) -> bytes:
        """Wait for bytes; the timeout begins anew while those that were sent still leave."""
        left = self._unacknowledged()
        while True:
            try:
                return self.socket.recv(size)
            except TimeoutError:
                before, left = left, self._unacknowledged()
                if left >= before:
                    raise

    def _unacknowledged(self) -> int:
        """Return how many bytes of this side the other one's kernel has not got (tcp(7))."""
        count: int = struct.unpack("i", fcntl.ioctl(self.socket, _SIOCOUTQ, bytes(4)))[0]
        return count


def bodies_of(contents: Contents, ranges: Ranges | None = None) -> Ranges:
    """Return where the bytes of a snapshot are behind the header, without shards beyond these ranges.

    Raises TransferError for ranges of shards that are not there.
    """
    shards, size = contents.shards, contents.size - HEADER
    if ranges is None:
        return ((0, size),)
    bounds = [0, *(bound for pair in ranges for bound in pair), shards]
    if bounds != sorted(bounds):
        raise TransferError("ranges of bytes that are not there")
    return (*ranges, (shards, size))
