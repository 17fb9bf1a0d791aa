"""Messages with descriptors (unix(7)), the socket at which a worker gets the memory of its agent, the store of a round.

A worker asks when it uses snapshots for the first time; no other process inherits a descriptor. At the same socket it
names the directory in which the agent writes checkpoints. Both sides check the user of the other one.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from slurm_elastic import typed_json
from slurm_elastic.snapshot.lineage import Holder, SnapshotId
from slurm_elastic.snapshot.memory import Slot
from slurm_elastic.snapshot.sharding import Ranges

if TYPE_CHECKING:
    from datetime import timedelta

VARIABLE = "SLURM_ELASTIC_SNAPSHOT"
"""Environment variable of a worker: the path of the socket."""

_LONGEST = 1 << 16
"""Bytes of a message."""
_MOST_SLOTS = 8
_NO_MEMORY = "the agent has no memory for snapshots"
_CREDENTIALS = struct.Struct("3i")


class HandOverError(OSError):
    """A process does not get memory of another one."""


def send(connection: socket.socket, message: object, slots: Sequence[Slot] = ()) -> None:
    """Send a message that keeps its boundaries, with the descriptors of slots; raises OSError."""
    socket.send_fds(connection, [msgspec.json.encode(message)], [slot.descriptor for slot in slots])


def receive(connection: socket.socket, kind: Any) -> tuple[Any, list[Slot]] | None:
    """Wait for a message of this type, and the slots that come with it; None if the other side has ended.

    Raises OSError or JSONError.
    """
    content, descriptors, flags, _ = socket.recv_fds(connection, _LONGEST, _MOST_SLOTS, socket.MSG_CMSG_CLOEXEC)
    slots = [Slot(descriptor) for descriptor in descriptors]
    if flags & socket.MSG_CTRUNC:
        raise HandOverError("this process may not open so many files; raise its limit (ulimit -n)")
    return (typed_json.decode(content, kind), slots) if content else None


@dataclass(frozen=True, slots=True)
class Directory:
    """The directory of a round's checkpoints.

    Attributes:
        every: Seconds between checkpoints.
        keep: Number of checkpoints that stay.
        start: Number of the round's start in the directory; 0 before it has one.
        origin: Number of the start in the directory that took the snapshot in memory which the round started from; 0 if
            there is none.
        checkpoint: Start and step of the checkpoint that the round starts from; None for none.
        has_parts: True if agents write parts of snapshots, too.
        collector: The agent that finds the step which all agents write, if nothing is copied to other nodes.
        every_steps: Steps after which a checkpoint is due before that time; 0 for none.
        begins: The step that the round starts from.
    """

    path: str
    every: float
    keep: int
    start: int = 0
    origin: int = 0
    checkpoint: tuple[int, int] | None = None
    has_parts: bool = False
    collector: Holder | None = None
    every_steps: int = 0
    begins: int = 0


@dataclass(frozen=True, slots=True)
class Request:
    """The request of a worker.

    Attributes:
        directory: In which the agent writes checkpoints from now on; None to get memory.
        writes: Local rank that asks for the slots for its own parts; None for the slots for the state of all ranks.
        part: Number of the part of the origin that it asks for; None for slots.
        ranges: Where the bytes begin and end that it needs of the shards of that part; the others may be missing. None
            for all.
    """

    round: int
    directory: Directory | None = None
    writes: int | None = None
    part: int | None = None
    ranges: Ranges | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of an agent.

    Attributes:
        slot: Index of the slot from which the workers of the round start; None if from none.
        error: Why the worker gets no memory; empty if it does.
        below: Only checkpoints of earlier steps are used, if the round starts from disk; None for all.
        lost: See :class:`~.lineage.Origin`.
        collector: To the agent of rank 0 that names a directory, see `Directory`; None if there is no need.
        held: Bytes that the agent holds for snapshots.
    """

    slot: int | None = None
    error: str = ""
    below: int | None = None
    lost: SnapshotId | None = None
    collector: Holder | None = None
    held: int = 0
    replicates: bool = False
    fewest_nodes: int = 1


def ask(path: str, request: Request, failure: str = _NO_MEMORY) -> tuple[Answer, list[Slot]]:
    """Ask the agent for memory, and wait until what was saved of the round's origin is there; or name a directory.

    Returns the answer, and all slots, or one with a part, or none if the request names a directory. Raises RuntimeError
    if the agent has ended, is another user's, or refuses.
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC) as connection:
            connection.connect(path)
            _require_own_user(connection)
            send(connection, request)
            received = receive(connection, Answer)
    except HandOverError as error:
        raise RuntimeError(f"{failure}: {error}") from None
    except OSError as error:
        raise RuntimeError(f"{failure}: {path} does not answer: {error.strerror or error}") from None
    if received is None:
        raise RuntimeError(f"{failure}: the agent has ended")
    answered, slots = received
    if answered.error or not (slots or request.directory):
        raise RuntimeError(f"{failure}: {answered.error or _NO_MEMORY}")
    return answered, slots


def read_request(connection: socket.socket) -> Request:
    """Return the request of a worker; raises OSError if it has gone or is another user's, JSONError for no request."""
    _require_own_user(connection)
    received = receive(connection, Request)
    if received is None:
        raise HandOverError("no request")
    request: Request = received[0]
    return request


def _require_own_user(connection: socket.socket) -> None:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(credentials)
    if user != os.geteuid():
        raise HandOverError(f"the other side is user {user}")


def round_store(timeout: timedelta) -> Any:
    """Connect to the store of the round, torch's TCPStore, with a time limit for each request.

    Values are bytes; nothing is unpickled. Raises torch's DistError, a RuntimeError, or LookupError without an address.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(address, port, is_master=False, timeout=timeout, wait_for_workers=False)
