"""The private line between the agent and its fork server.

A pair of Unix sockets without a name: nobody else can reach it. Messages are small JSON objects that keep their
boundaries (SOCK_SEQPACKET); what may be large (a worker's environment, a pickled call) travels as a memory file
(see `_memory_file`) whose descriptor goes with the message.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from typing import Any

from slurm_elastic.agent.forkserver._waiting import wait_on

__all__ = ["Channel"]

_LONGEST = 65536
_MOST_DESCRIPTORS = 16


class Channel:
    """One end of the line."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end

    @classmethod
    def pair(cls) -> tuple[Channel, Channel]:
        """Both ends; neither survives an execve unless it is passed on by name."""
        one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(one), cls(other)

    @classmethod
    def inherited(cls, descriptor: int) -> Channel:
        """The end that this process was started with."""
        os.set_inheritable(descriptor, False)
        return cls(socket.socket(fileno=descriptor))

    def detach(self) -> int:
        """Give up the descriptor, for `inherited`."""
        return self._socket.detach()

    def fileno(self) -> int:
        """Readable when a message waits or the other end is gone."""
        return self._socket.fileno()

    def readable(self, seconds: float = 0.0) -> bool:
        """Return whether `receive` would not wait, or need not within so many seconds."""
        return bool(wait_on([self.fileno()], seconds))

    def send(self, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        """Send one message.

        Raises:
            OSError: the other end is gone, or the message is longer than 64 KiB.
        """
        data = json.dumps(message).encode()
        if descriptors:
            socket.send_fds(self._socket, [data], list(descriptors))
        else:
            self._socket.send(data)

    def receive(self) -> tuple[dict[str, Any], list[int]] | None:
        """Take the next message, waiting for it; None when the other end is gone."""
        try:
            data, descriptors, _flags, _address = socket.recv_fds(self._socket, _LONGEST, _MOST_DESCRIPTORS)
        except ConnectionResetError:
            return None
        for descriptor in descriptors:
            # Python 3.11 does not pass on MSG_CMSG_CLOEXEC (Lib/socket.py, recv_fds).
            os.set_inheritable(descriptor, False)
        return (json.loads(data), descriptors) if data else None

    def close(self) -> None:
        """Close this end."""
        self._socket.close()
