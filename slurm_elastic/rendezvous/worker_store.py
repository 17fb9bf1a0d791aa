"""The store through which the workers of one round find each other: fresh each round, on rank 0's node.

torch's TCPStore authenticates no client: each reads and writes its keys. So it listens where the workers
of the round need it and nowhere else, on the loopback if all of them are on this node. And it is served by a process of
its own: a client takes that process's descriptors, and none of the agent's.
"""

from __future__ import annotations

import contextlib
import socket

from slurm_elastic.rendezvous.store_process import ServedStore, serve_store
from slurm_elastic.rendezvous.transport.messages import Assignment
from slurm_elastic.slurm.address import resolve

_LOOPBACK = "127.0.0.1"
_REMEMBERED = 256


class ReservedPort:
    """A port that is bound before it is announced, so no other process can take it in between.

    IPv4 only: TCPStore's server (torch 2.13, TCPStoreLibUvBackend.cpp) looks up the name of every peer before it serves
    another one, and for a peer on a dual-stack socket, ``::ffff:10.0.0.1``, /etc/hosts is of no help; with a name
    server that is slow every connection would cost seconds.

    Args:
        address: on which other nodes reach this one; empty for all. One that is not this node's own, such as that of a
            gateway, is no address to listen on, and counts for all.
    """

    def __init__(self, address: str = "") -> None:
        self.address = address
        try:
            self._socket: socket.socket | None = socket.create_server((address, 0), backlog=4096)
        except OSError:
            if not address:
                raise
            self.address = ""
            self._socket = socket.create_server(("", 0), backlog=4096)
        self.port: int = self._socket.getsockname()[1]

    def withdraw(self) -> None:
        """Listen on the loopback in place of the address that was announced, on the same port."""
        if self._socket is None or self.address == _LOOPBACK:
            return
        if not self.address:
            # The kernel gives one address of a port that is bound on all to no process, not even to its holder.
            self._socket.close()
        loopback = socket.create_server((_LOOPBACK, self.port), backlog=4096)
        self._socket.close()
        self._socket, self.address = loopback, _LOOPBACK

    def take(self) -> int:
        """Return the listening socket's descriptor; the caller closes it."""
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

    The kernel may give a port that was closed to the next process that asks for one. A worker of an earlier round that
    still connects to its store would reach that of another round there.

    Args:
        address: name or address at which other nodes reach this agent; empty to listen on all.
    """

    def __init__(self, address: str = "") -> None:
        self._name = address
        self._given: dict[int, None] = {}

    def reserve(self) -> ReservedPort:
        """Reserve one more."""
        old: list[ReservedPort] = []
        address = resolve(self._name) if self._name else None
        if address is None or ":" in address or address.startswith("127."):
            # Nothing that other nodes reach by IPv4; a run of this node alone withdraws to the loopback.
            address = ""
        try:
            while (fresh := ReservedPort(address)).port in self._given:
                # Kept until another one is found, so that it is not given again.
                old.append(fresh)
        finally:
            for port in old:
                port.close()
        self._given[fresh.port] = None
        if len(self._given) > _REMEMBERED:
            del self._given[next(iter(self._given))]
        return fresh


def open_worker_store(placed: Assignment, reserved: ReservedPort) -> ServedStore | None:
    """On rank 0's agent, serve the store of this round on the port that was announced; None elsewhere."""
    if placed.place.rank != 0:
        reserved.close()
        return None
    if placed.nodes == 1:
        with contextlib.suppress(OSError):
            reserved.withdraw()
    return serve_store(reserved.address or _LOOPBACK, reserved.port, reserved.take())
