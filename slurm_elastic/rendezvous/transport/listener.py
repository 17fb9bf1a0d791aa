"""The listener of an agent, which admits members of the run and bounds the connections of strangers.

It listens as long as the agent lives: a refused connection says that the agent's process has ended. While no leader
runs here, it tells that to members of the run that connect, with proof of the run's secret.

A connection goes through three states. One that has sent nothing yet, or only part of a greeting, is a stranger's: the
listener keeps a socket for it and no more. Strangers get the descriptors that members of the run leave, at least
`STRANGERS`; a further one replaces the oldest. A greeting with a valid tag proves membership of the run
(:mod:`.session`): this connection is admitted, and the listener never drops it for another one. Once it has proved
which agent it belongs to, it is that agent's connection.

The listener reads admitted connections before it accepts more; the rest wait in the kernel's backlog, which does not
refuse: Linux drops the last packet of a connection that finds it full, and the other side repeats it after 1 s (tcp(7);
tcp_abort_on_overflow is 0 unless an administrator has changed it).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import Callable
from dataclasses import dataclass

from slurm_elastic.descriptors import STRANGERS
from slurm_elastic.rendezvous.transport.session import RefusedError, Session, SessionError

_HANDSHAKE_TIMEOUT = 10.0
"""Seconds from the acceptance of a connection to the end of its greeting."""
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_ROOM_AGAIN = 0.2
"""Seconds until the listener accepts again, when the process has no descriptor left."""
_AT_ONCE = 16
"""Connections that the listener accepts before the loop serves others."""
_GREETING = 16384
"""Bytes read at once from a stranger; a greeting has a few hundred."""


@dataclass(eq=False, slots=True)
class _Stranger:
    connection: socket.socket
    peer: str
    session: Session | None = None


class Listener:
    """Accepts connections until it is closed.

    Args:
        idle_session: Makes the listening end of a session that says that no leader runs here.
    """

    def __init__(self, listening: socket.socket, idle_session: Callable[[], Session]) -> None:
        self._listening, self._idle_session = listening, idle_session
        self._port: int = listening.getsockname()[1]
        self._loop = asyncio.get_running_loop()
        self._strangers: dict[_Stranger, asyncio.TimerHandle] = {}
        self._later: asyncio.TimerHandle | None = None
        listening.setblocking(False)
        self.turn_away()
        self._open()

    def admit(
        self,
        new_session: Callable[[], Session],
        serve: Callable[[Session, str, socket.socket], object],
        reject: Callable[[str, str], None],
        room: Callable[[], int],
    ) -> None:
        """Admit members of the run from now on, for a leader.

        Args:
            serve: Takes over a connection that was admitted, with its session, which waits for the proof of identity,
                and the address of the other end.
            reject: Called with the address of a stranger that was dropped, and why.
            room: Returns the number of strangers' connections for which there are descriptors now.
        """
        self._dismiss_all()
        self._new_session, self._serve, self._reject, self._room = new_session, serve, reject, room

    def turn_away(self) -> None:
        """Admit no connection from now on: no leader runs here."""
        self._dismiss_all()
        self._new_session, self._serve = self._idle_session, lambda session, peer, stream: stream.close()
        self._reject, self._room = lambda peer, why: None, lambda: STRANGERS

    def close(self) -> None:
        """Accept no more, close the connections of strangers, and the socket."""
        self._loop.remove_reader(self._listening)
        if self._later is not None:
            self._later.cancel()
        self._dismiss_all()
        self._listening.close()

    def admit_waiting(self, most: int = 1024) -> None:
        """Accept the connections that wait in the kernel, at most `most`, and read their greetings."""
        for _ in range(most):
            if not self._accept_one():
                return

    def _open(self) -> None:
        self._loop.add_reader(self._listening, self.admit_waiting, _AT_ONCE)

    def _accept_one(self) -> bool:
        try:
            connection, address = self._listening.accept()
        except OSError as error:
            if error.errno in _NO_ROOM:
                self._make_room()
            # No connection waits (any more), or the one that did has ended (accept(2)).
            return False
        connection.setblocking(False)
        self._attend(_Stranger(connection, str(address[0])))
        return True

    def _make_room(self) -> None:
        if self._strangers:
            self._drop(next(iter(self._strangers)), "one of too many connections")
            return
        # The listening socket stays readable, and the loop would call at once again.
        self._loop.remove_reader(self._listening)
        self._later = self._loop.call_later(_ROOM_AGAIN, self._open)

    def _attend(self, stranger: _Stranger) -> None:
        """Read what a stranger has sent; it cannot make the caller fail, which may be the leader's clock."""
        try:
            self._read(stranger)
        except Exception as error:
            self._drop(stranger, f"what makes this release fail ({type(error).__name__})")

    def _read(self, stranger: _Stranger) -> None:
        try:
            data = stranger.connection.recv(_GREETING)
        except BlockingIOError:
            self._wait_for(stranger)
            return
        except OSError:
            data = b""
        if not data:
            self._dismiss(stranger)
            return
        session = stranger.session
        if session is None:
            session = stranger.session = self._new_session()
            session.port = self._port
        try:
            _, answer = session.receive(data)
        except SessionError as error:
            with contextlib.suppress(OSError):
                stranger.connection.send(error.answer)
            if not isinstance(error, RefusedError):
                self._reject(stranger.peer, str(error))
            self._dismiss(stranger)
            return
        if session.admitted:
            self._admit(stranger, session, answer)
        else:
            self._wait_for(stranger)

    def _wait_for(self, stranger: _Stranger) -> None:
        if stranger in self._strangers:
            return
        self._strangers[stranger] = self._loop.call_later(
            _HANDSHAKE_TIMEOUT, self._drop, stranger, "a handshake that was never completed"
        )
        self._loop.add_reader(stranger.connection, self._attend, stranger)
        if len(self._strangers) > STRANGERS and len(self._strangers) > self._room():
            self._drop(next(iter(self._strangers)), "one of too many connections that have said nothing")

    def _drop(self, stranger: _Stranger, why: str) -> None:
        self._reject(stranger.peer, why)
        self._dismiss(stranger)

    def _forget(self, stranger: _Stranger) -> None:
        if stranger in self._strangers:
            self._strangers.pop(stranger).cancel()
            self._loop.remove_reader(stranger.connection)

    def _dismiss(self, stranger: _Stranger) -> None:
        self._forget(stranger)
        stranger.connection.close()

    def _dismiss_all(self) -> None:
        for stranger in [*self._strangers]:
            self._dismiss(stranger)

    def _admit(self, stranger: _Stranger, session: Session, answer: bytes) -> None:
        self._forget(stranger)
        connection = stranger.connection
        try:
            # The first bytes on a connection always find room.
            whole = connection.send(answer) == len(answer)
        except OSError:
            whole = False
        if whole:
            self._serve(session, stranger.peer, connection)
        else:
            connection.close()
