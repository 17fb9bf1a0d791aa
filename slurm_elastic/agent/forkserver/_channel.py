"""The channel between the agent and its fork server.

It is a pair of Unix sockets without a name, so no other process can connect. Messages are small JSON objects that keep
their boundaries (SOCK_SEQPACKET); what may be large (a worker's environment, a pickled call) goes into a memory file
(see `_memfd`) whose descriptor is sent with the message.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from typing import Any

from slurm_elastic.agent.forkserver._waiting import wait_on

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

    def readable(self) -> bool:
        """Return whether `receive` would return at once."""
        return bool(wait_on([self.fileno()], 0))

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
