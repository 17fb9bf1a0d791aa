"""Serves each worker store in a process of its own, forked from one that has no threads.

A fork copies locks as they are. TCPStore's constructor looks up names (getnameinfo), for which glibc (2.36,
resolv_conf.c) takes a lock. In a copy of a process in which another thread looked up a name at that moment, no thread
gives that lock back, and the workers of the round wait for their store in vain. So an agent forks one process before it
starts its first thread, and that one forks the stores.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import signal
import socket
from datetime import timedelta
from typing import NoReturn

from torch._C._distributed_c10d import TCPStore

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
            # The kernel closes the other end when the process ends, which may be before it closes the store's port.
            self._lifeline.recv(1)
        if self._process is not None:
            ended = select.poll()
            ended.register(self._process, select.POLLIN)
            ended.poll()
            os.close(self._process)

    def __del__(self) -> None:
        """See :meth:`close`."""
        with contextlib.suppress(Exception):
            self.close()


def prepare_stores() -> None:
    """Fork the process from which stores are forked; call this before this process starts threads."""
    _orders()


def serve_store(address: str, port: int, listener: int) -> ServedStore:
    """Serve a store.

    Args:
        address: The address at which the store itself connects to it.
        port: The port of the listening socket.
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
