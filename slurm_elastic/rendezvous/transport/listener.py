"""Accepts connections, or turns them away, on a socket that listens as long as its agent lives."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable

__all__ = ["Door"]

_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_ROOM_AGAIN = 1.0


class Door:
    """Accepts until it is closed.

    asyncio's own server (3.11, base_events.py, Server._attach) loses connections that it has accepted when it is closed
    in the same moment: they stay open, and the other side waits for an answer that nobody gives.

    Args:
        listener: bound and listening; stays open.
        make: makes what serves a connection. None to close each one at once.
        at_once: connections that are accepted together, before anybody hears of one of them.
    """

    def __init__(self, listener: socket.socket, make: Callable[[], asyncio.Protocol] | None, at_once: int = 16) -> None:
        self._listener, self._make, self._at_once = listener, make, at_once
        self._loop = asyncio.get_running_loop()
        self._coming: dict[asyncio.Task[object], socket.socket] = {}
        self._later: asyncio.TimerHandle | None = None
        listener.setblocking(False)
        self._open()

    def close(self) -> None:
        """Accept no more; whoever was accepted and not served yet is turned away."""
        self._loop.remove_reader(self._listener)
        if self._later is not None:
            self._later.cancel()
        for task in [*self._coming]:
            task.cancel()

    def _open(self) -> None:
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(self._at_once):
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if error.errno in _NO_ROOM:
                    # It would be readable all the time.
                    self._loop.remove_reader(self._listener)
                    self._later = self._loop.call_later(_ROOM_AGAIN, self._open)
                # Nobody is there (any more), or the one that was has gone (accept(2)).
                return
            if self._make is None:
                connection.close()
                continue
            connection.setblocking(False)
            task: asyncio.Task[object] = self._loop.create_task(self._serve(self._make, connection))
            self._coming[task] = connection
            task.add_done_callback(self._served)

    async def _serve(self, make: Callable[[], asyncio.Protocol], connection: socket.socket) -> object:
        return await self._loop.connect_accepted_socket(make, connection)

    def _served(self, task: asyncio.Task[object]) -> None:
        connection = self._coming.pop(task)
        if task.cancelled() or task.exception() is not None:
            connection.close()
