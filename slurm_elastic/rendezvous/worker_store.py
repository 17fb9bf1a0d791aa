"""The store through which the workers of one round find each other: fresh each round, on rank 0's node."""

from __future__ import annotations

import socket
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

from slurm_elastic.rendezvous.transport.messages import Placed

__all__ = ["FreshPorts", "ReservedPort", "open_worker_store"]

_TIMEOUT = timedelta(seconds=300)
_REMEMBERED = 256


class ReservedPort:
    """A port that is bound before it is announced, so nobody can take it in between.

    IPv4 only: TCPStore's server (torch 2.13, TCPStoreLibUvBackend.cpp) looks up the name of every peer while nobody
    else is served, and for a peer on a dual-stack socket, ``::ffff:10.0.0.1``, /etc/hosts is of no help; with a name
    server that is slow every connection would cost seconds.
    """

    def __init__(self) -> None:
        self._socket: socket.socket | None = socket.create_server(("", 0), backlog=4096)
        self.port: int = self._socket.getsockname()[1]

    def take(self) -> int:
        """The listening socket's descriptor; whoever takes it closes it."""
        if self._socket is None:
            raise ValueError("the port was taken already")
        taken, self._socket = self._socket, None
        taken.setblocking(False)
        return taken.detach()

    def close(self) -> None:
        """Give the port back, unless it was taken."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


class FreshPorts:
    """Reserves the ports of one agent, none of them twice within the last 256.

    The kernel gives a port that was closed to whoever asks next. A worker of an earlier round that still looks for its
    store would find that of another round there.
    """

    def __init__(self) -> None:
        self._given: dict[int, None] = {}

    def reserve(self) -> ReservedPort:
        """Reserve one more."""
        old: list[ReservedPort] = []
        try:
            while (fresh := ReservedPort()).port in self._given:
                # Kept until another one is found, so that it is not given again.
                old.append(fresh)
        finally:
            for port in old:
                port.close()
        self._given[fresh.port] = None
        if len(self._given) > _REMEMBERED:
            del self._given[next(iter(self._given))]
        return fresh


def open_worker_store(placed: Placed, reserved: ReservedPort) -> TCPStore | None:
    """On rank 0's agent, serve the store of this round on the port that was announced; None elsewhere."""
    if placed.place.rank != 0:
        reserved.close()
        return None
    return TCPStore(
        "127.0.0.1",
        reserved.port,
        is_master=True,
        wait_for_workers=False,
        timeout=_TIMEOUT,
        master_listen_fd=reserved.take(),
    )
