"""The store through which the workers of one round find each other: fresh each round, on rank 0's node.

torch's TCPStore authenticates no client: each reads and writes its keys. So it listens where the workers
of the round need it and nowhere else, on the loopback if all of them are on this node. And it is served by a process of
its own: a client takes that process's descriptors, and none of the agent's.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import signal
import socket
from collections import deque
from datetime import timedelta
from typing import NoReturn

from torch._C._distributed_c10d import TCPStore

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
            self._socket = socket.create_server((address, 0), backlog=4096)
        except OSError:
            if not address:
                raise
            self.address = ""
            self._socket = socket.create_server(("", 0), backlog=4096)
        self.port: int = self._socket.getsockname()[1]

    def withdraw(self) -> None:
        """Listen on the loopback in place of the address that was announced, on the same port."""
        if self.address == _LOOPBACK:
            return
        if not self.address:
            # The kernel gives one address of a port that is bound on all to no process, not even to its holder.
            self._socket.close()
        loopback = socket.create_server((_LOOPBACK, self.port), backlog=4096)
        self._socket.close()
        self._socket, self.address = loopback, _LOOPBACK

    def take(self) -> int:
        """Return the listening socket's descriptor; the caller closes it."""
        self._socket.setblocking(False)
        return self._socket.detach()

    def close(self) -> None:
        """Give the port back, unless it was taken."""
        self._socket.close()


class FreshPorts:
    """Reserves the ports of one agent, none of them twice within the last 256.

    The kernel may give a port that was closed to the next process that asks for one. A worker of an earlier round that
    still connects to its store would reach that of another round there.

    Args:
        address: name or address at which other nodes reach this agent; empty to listen on all.
    """

    def __init__(self, address: str = "") -> None:
        self._name = address
        self._given = deque[int](maxlen=_REMEMBERED)

    def reserve(self) -> ReservedPort:
        """Reserve one more."""
        address = resolve(self._name) if self._name else None
        if address is None or ":" in address or address.startswith("127."):
            # Nothing that other nodes reach by IPv4; a run of this node alone withdraws to the loopback.
            address = ""
        with contextlib.ExitStack() as others:
            while (fresh := ReservedPort(address)).port in self._given:
                # Kept until another one is found, so that it is not given again.
                others.callback(fresh.close)
        self._given.append(fresh.port)
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


# A store is forked from a process that the agent has forked before its first thread. A fork copies locks as they are:
# TCPStore's constructor looks up names (getnameinfo), for which glibc (2.36, resolv_conf.c) takes a lock. If another
# thread had it at that moment, the workers of the round would wait for their store in vain.
_TIMEOUT = timedelta(seconds=300)
_LONGEST_ORDER = 256


class ServedStore:
    """A store that a process of its own serves, until it is closed or forgotten, or this process ends."""

    def __init__(self, lifeline: socket.socket, pid: int) -> None:
        self._lifeline = lifeline
        self._process: int | None = None
        # Linux before 5.3 has no pidfd_open.
        with contextlib.suppress(OSError):
            self._process = os.pidfd_open(pid)

    def close(self) -> None:
        """End it. Clients that wait in it come back from C++ code, so that they can handle a signal."""
        if self._lifeline.fileno() < 0:
            return
        with self._lifeline, contextlib.suppress(OSError):
            self._lifeline.shutdown(socket.SHUT_WR)
            if self._process is not None:
                # It may not come to read that: it may be stopped, or look up a name.
                signal.pidfd_send_signal(self._process, signal.SIGKILL)
            # The kernel closes the other end when the process ends, which may be before it closes the store's port.
            self._lifeline.recv(1)
        if self._process is not None:
            ended = select.poll()
            ended.register(self._process, select.POLLIN)
            ended.poll()
            os.close(self._process)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()


def prepare_stores() -> None:
    """Fork the process from which stores are forked; call this before this process starts threads."""
    _orders()


def serve_store(address: str, port: int, listener: int) -> ServedStore:
    """Serve a store.

    Args:
        listener: The descriptor of the listening socket; it is closed here.

    Raises:
        OSError: No process can be forked for it.
    """
    try:
        served = _order(address, port, listener)
        if served is None:
            # The process that forks stores was killed.
            _orders.cache_clear()
            served = _order(address, port, listener)
    finally:
        os.close(listener)
    if served is None:
        raise OSError(f"no process serves the workers' store on port {port}")
    return served


def _order(address: str, port: int, listener: int) -> ServedStore | None:
    """Have a store forked; return None if the process that forks stores was killed before it answered."""
    ours, theirs = socket.socketpair()
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        with theirs:
            socket.send_fds(_orders(), [f"{port} {address}".encode()], [listener, theirs.fileno()])
        if pid := ours.recv(16):
            return ServedStore(ours, int(pid))
    ours.close()
    return None


@functools.cache
def _orders() -> socket.socket:
    """Return the socket to the process that forks the stores of this one."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        _fork_stores(theirs)
    theirs.close()
    return ours


def _fork_stores(orders: socket.socket) -> NoReturn:
    """Be the process that forks a store for each order, until the agent ends."""
    try:
        # Slurm signals every process of a step, and these are needed as long as their agent says.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        # The kernel then reaps the stores.
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        _close_all_but(orders.fileno())
        while (received := socket.recv_fds(orders, _LONGEST_ORDER, 2))[0]:
            order, (listener, lifeline), _, _ = received
            if os.fork() == 0:
                port, _, address = order.decode().partition(" ")
                _serve(address, int(port), listener, lifeline)
            os.close(listener)
            os.close(lifeline)
    finally:
        os._exit(0)


def _serve(address: str, port: int, listener: int, lifeline: int) -> NoReturn:
    """Be the process that serves a store."""
    code = 1
    try:
        _close_all_but(listener, lifeline)
        os.write(lifeline, str(os.getpid()).encode())
        _store = TCPStore(
            address, port, is_master=True, wait_for_workers=False, timeout=_TIMEOUT, master_listen_fd=listener
        )
        os.read(lifeline, 1)
        code = 0
    finally:
        os._exit(code)


def _close_all_but(*kept: int) -> None:
    """Close what this process got from its parent, but for the standard streams."""
    low = 3
    for descriptor in sorted(kept):
        os.closerange(low, descriptor)
        low = descriptor + 1
    os.closerange(low, os.sysconf("SC_OPEN_MAX"))
