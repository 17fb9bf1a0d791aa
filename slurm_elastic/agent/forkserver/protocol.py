"""The messages between an agent and its fork server: their channel, the states, and the order to start a worker."""

from __future__ import annotations

import enum
import json
import os
import select
import socket
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple


class State(enum.Enum):
    """The state of a fork server."""

    IMPORTING = "importing"
    WARM = "warm"
    COLD = "cold"
    """The fork server executes workers; it cannot fork them."""
    DEAD = "dead"


class StartInterruptedError(Exception):
    """The caller asked to stop waiting for workers to start."""


class Order(NamedTuple):
    """One worker to start."""

    rank: int
    """Local rank."""
    command: tuple[str, ...]
    """The whole command of the worker, as sys.orig_argv shows it."""
    environment: Mapping[str, str]
    cpus: tuple[int, ...] | None
    """CPUs to bind the worker to; None for all."""
    descriptors: Mapping[str, int]
    """Open files by name (stdout, stderr, call, result); those not named are the agent's own."""


# The channel between the agent and its fork server.
#
# It is a pair of Unix sockets without a name, so no other process can connect. Messages are small JSON objects that
# keep their boundaries (SOCK_SEQPACKET); what may be large (a worker's environment, a pickled call) goes into a
# memory file (`linux.memory_file`) whose descriptor is sent with the message.
_LARGEST_MESSAGE = 65536
_MOST_DESCRIPTORS = 16


class Channel:
    """One end of the channel."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end

    @classmethod
    def pair(cls) -> tuple[Channel, Channel]:
        """Return both ends; an execve closes them unless their descriptors are made inheritable."""
        first, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(first), cls(other)

    @classmethod
    def inherited(cls, descriptor: int) -> Channel:
        """Return the end with this descriptor, which this process has inherited or received."""
        os.set_inheritable(descriptor, False)
        return cls(socket.socket(fileno=descriptor))

    def detach(self) -> int:
        """Return the descriptor, for `inherited`; this object is closed from now on."""
        return self._socket.detach()

    def fileno(self) -> int:
        """Return a descriptor that is readable when there is a message, or the other end is closed."""
        return self._socket.fileno()

    def send(self, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        """Send one message.

        Raises:
            OSError: The other end is closed, or the message is longer than 64 KiB.
        """
        data = json.dumps(message).encode()
        if descriptors:
            socket.send_fds(self._socket, [data], list(descriptors))
        else:
            self._socket.send(data)

    def receive(self) -> tuple[dict[str, Any], list[int]] | None:
        """Wait for the next message and return it with its descriptors; None when the other end is closed."""
        try:
            data, descriptors, _flags, _address = socket.recv_fds(self._socket, _LARGEST_MESSAGE, _MOST_DESCRIPTORS)
        except ConnectionResetError:
            return None
        for descriptor in descriptors:
            # recv_fds ignores its flags (Lib/socket.py, Python 3.11), MSG_CMSG_CLOEXEC among them.
            os.set_inheritable(descriptor, False)
        return (json.loads(data), descriptors) if data else None

    def close(self) -> None:
        """Close this end."""
        self._socket.close()


def wait_on(descriptors: Iterable[int], seconds: float | None) -> set[int]:
    """Wait until a descriptor is readable, up to `seconds` (None: without limit); return the readable ones.

    A pidfd is readable when its process has ended.
    """
    waiting = select.poll()
    for descriptor in descriptors:
        waiting.register(descriptor, select.POLLIN)
    ready = waiting.poll(None if seconds is None else max(0.0, seconds) * 1000)
    return {descriptor for descriptor, _events in ready}
