"""Copies the parts of snapshots to another node, in a process of its own: no heartbeat and no worker waits for it.

The agent starts the process when a worker saves a part, or another agent asks for it, and sends orders with the
descriptors of slots. The process reads the headers of these slots again and again, reports to the collector, says to
workers which slots to keep, sends the parts that become safe to the agent on another node, and takes those of another
one. When the workers have ended because agents leave, it sends the newest parts.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from slurm_elastic.snapshot._child_process import Child, start_child
from slurm_elastic.snapshot.hand_over import receive, send
from slurm_elastic.snapshot.lineage import Group, Holder, SnapshotId
from slurm_elastic.snapshot.memory import Slot
from slurm_elastic.snapshot.transfer import Settings, listen

logger = logging.getLogger("slurm_elastic")

PROCESS = "slurm_elastic.snapshot._replicator_main"
"""The module whose `main` the process runs."""


class Members(msgspec.Struct, frozen=True, tag=True):
    """An order, with the descriptors of the slots for the state of all ranks: a round has started.

    Attributes:
        collector: The agent that collects reports.
        safe: The snapshot that is kept until a step of the round is safe; None if there is none, and if nothing is
            copied to other nodes.
        replicates: False if nothing is copied to other nodes: the agents only find steps that they write to disk, and
            `collector` is the process itself.
    """

    round: int
    group: Group
    collector: Holder
    safe: SnapshotId | None
    replicates: bool = True


class Slots(msgspec.Struct, frozen=True, tag=True):
    """An order, with descriptors: the slots of a local rank."""

    local_rank: int


class Wanted(msgspec.Struct, frozen=True, tag=True):
    """An order: the next step that becomes safe is to be written to disk."""


class Ended(msgspec.Struct, frozen=True, tag=True):
    """An order: the workers of the round have ended.

    With `moves` agents leave as announced, so that the newest parts are copied; else nothing more is.
    """

    moves: bool


class News(msgspec.Struct, frozen=True):
    """An answer of the process, maybe with descriptors.

    Attributes:
        replicas: Local rank, at another agent, of which these are the slots for copies.
        safe: The newest step that is safe, and its round.
        disk: The step that all agents write to disk, and its round; its slots are busy.
        sent: Number of a round that is over, whose newest parts have been sent.
        received: Number of a round that is over, whose newest parts of another agent have come, or do not come.
        problem: Why parts are not copied, as one line.
    """

    replicas: int | None = None
    safe: SnapshotId | None = None
    disk: SnapshotId | None = None
    sent: int | None = None
    received: int | None = None
    problem: str = ""


class ReplicatorProcess:
    """The process, as its agent sees it; started by the first order.

    `replicas` takes the slots for copies from another node, by local rank there; `disk` the step that all write to
    disk.
    """

    def __init__(
        self, settings: Settings, replicas: Callable[[int, list[Slot]], None], disk: Callable[[SnapshotId], None]
    ) -> None:
        self._settings, self._replicas, self._disk = settings, replicas, disk
        self._lock = threading.Lock()
        self._process: Child | None = None
        self._socket: socket.socket | None = None
        self._changed = threading.Condition()
        self._port = 0
        self._sent = self._received = -1
        self._over = False
        self.safe: SnapshotId | None = None
        """The newest snapshot that is safe, as far as this agent knows."""

    def port(self) -> int:
        """Return the port of the process, which is started for that; raises OSError if it cannot be."""
        with self._lock:
            self._start()
            return self._port

    def order(self, order: Members | Slots | Wanted | Ended, slots: Sequence[Slot] = ()) -> None:
        """Give an order; raises OSError if the process cannot be started, or has ended."""
        with self._lock:
            self._start()
            assert self._socket is not None
            send(self._socket, order, slots)

    def settle(self, round_: int, *, leaving: bool, until: float, is_leaving: Callable[[], bool]) -> None:
        """Wait until the newest parts of a round that is over are where they are needed, or until a monotonic time.

        With `leaving` this agent has to have sent its own; else those of another one have to be here. Ends if
        `is_leaving()`.
        """
        with self._changed:
            while not self._over and not is_leaving() and time.monotonic() < until:
                if (self._sent if leaving else self._received) >= round_:
                    return
                self._changed.wait(0.1)

    def close(self) -> None:
        """End the process."""
        with self._lock:
            if self._socket is not None:
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)
            if self._process is not None:
                self._process.kill()
                self._process.wait()

    def _start(self) -> None:
        if self._process is not None:
            return
        listener, self._port = listen()
        with listener:
            self._process, ours = start_child(PROCESS, listener.fileno())
        self._socket = ours
        send(ours, self._settings)
        threading.Thread(target=self._listen, args=(ours,), name="slurm-elastic-replicator", daemon=True).start()

    def _listen(self, news: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while (received := receive(news, News)) is not None:
                message, slots = received
                if message.replicas is not None:
                    self._replicas(message.replicas, slots)
                if message.disk is not None:
                    self._disk(message.disk)
                if message.problem:
                    logger.warning("snapshots: %s", message.problem)
                with self._changed:
                    self.safe = message.safe or self.safe
                    self._sent = self._sent if message.sent is None else message.sent
                    self._received = self._received if message.received is None else message.received
                    self._changed.notify_all()
        with self._changed:
            self._over = True
            self._changed.notify_all()
