"""The socket at which a worker gets the memory of its agent: one request and one answer, with descriptors (unix(7)).

The socket is in a directory that only this user can enter, and both sides check the user of the other one. A worker
asks when it uses snapshots for the first time, whatever started it; no other process inherits a descriptor.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from dataclasses import dataclass
from typing import Any

from slurm_elastic.snapshot.lineage import SLOTS

__all__ = ["VARIABLE", "Answer", "HandOverError", "Request", "answer", "ask", "read_request"]

VARIABLE = "SLURM_ELASTIC_SNAPSHOT"
"""Environment variable of a worker: the path of the socket."""

_LIMIT = 4096
_CREDENTIALS = struct.Struct("3i")


class HandOverError(Exception):
    """A worker does not get the memory of its agent."""


@dataclass(frozen=True, slots=True)
class Request:
    """The request of a worker: the round that it belongs to."""

    round: int


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of an agent.

    Attributes:
        slot: Index of the slot from which the workers of the round start; None if from none.
        error: Why the worker gets no memory; empty if it does.
    """

    slot: int | None = None
    error: str = ""


def ask(path: str, request: Request) -> tuple[Answer, list[int]]:
    """Ask the agent for its memory; waits until the snapshot of the round's origin is there.

    Returns:
        The answer, and descriptors of the slots, not inheritable.

    Raises:
        HandOverError: The agent has ended, is another user's, or refuses.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as connection:
        try:
            connection.connect(path)
            _require_own_user(connection)
            connection.sendall(json.dumps({"round": request.round}).encode() + b"\n")
            content, descriptors, _, _ = socket.recv_fds(connection, _LIMIT, SLOTS, socket.MSG_CMSG_CLOEXEC)
        except OSError as error:
            raise HandOverError(f"{path} does not answer: {error.strerror or error}") from None
    if not content:
        raise HandOverError("the agent has ended")
    fields = json.loads(content)
    answered = Answer(fields["slot"], fields["error"])
    if answered.error or len(descriptors) != SLOTS:
        for descriptor in descriptors:
            os.close(descriptor)
        raise HandOverError(answered.error or "the agent has no memory for snapshots")
    return answered, descriptors


def read_request(connection: socket.socket) -> Request:
    """Return the request of a worker.

    Raises:
        HandOverError: It is not one, or of another user.
        OSError: The worker has gone.
    """
    _require_own_user(connection)
    content = b""
    while not content.endswith(b"\n"):
        received = connection.recv(_LIMIT)
        content += received
        if not received or len(content) > _LIMIT:
            raise HandOverError("no request")
    fields: Any = json.loads(content)
    if not isinstance(fields, dict) or type(fields.get("round")) is not int:
        raise HandOverError("no request")
    return Request(fields["round"])


def answer(connection: socket.socket, answered: Answer, descriptors: list[int]) -> None:
    """Answer a worker.

    Raises:
        OSError: The worker has gone.
    """
    content = json.dumps({"slot": answered.slot, "error": answered.error}).encode()
    socket.send_fds(connection, [content], [] if answered.error else descriptors)


def _require_own_user(connection: socket.socket) -> None:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(credentials)
    if user != os.geteuid():
        raise HandOverError(f"the other side is user {user}")
