"""The agent's side: keeps the memory over rounds, says what it holds, and has the origin of a round in place."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import zlib
from collections.abc import Callable
from pathlib import Path

from slurm_elastic.snapshot import lineage
from slurm_elastic.snapshot.checkpoint_lineage import CheckpointId
from slurm_elastic.snapshot.disk import DiskWriter, Target
from slurm_elastic.snapshot.hand_over import VARIABLE, Answer, Directory, HandOverError, answer, read_request
from slurm_elastic.snapshot.lineage import SLOTS, Copy, Holder, Inventory, Origin
from slurm_elastic.snapshot.memory import OutOfMemoryError, Slot
from slurm_elastic.snapshot.transfer import Sender, TransferError, accepted, receive

__all__ = ["AgentMemory"]

logger = logging.getLogger("slurm_elastic")


class AgentMemory:
    """The memory in which an agent keeps snapshots for the workers of later rounds. For the agent's main thread.

    Args:
        directory: That only this user can enter; the socket for workers is made in it.
        secret: Of the run.
        run: Name of the incarnation.
        agent: Identity of this agent.
        node: Of this agent.
        address: At which other agents reach this one.

    Raises:
        OSError: The memory or the socket cannot be made.
    """

    def __init__(self, directory: Path, secret: bytes, run: str, agent: str, node: str, address: str) -> None:
        self._secret, self._run, self._agent, self._node, self._address = secret, run, agent, node, address
        self._slots = [Slot.make() for _ in range(SLOTS)]
        self._sender: Sender | None = None
        self._path = directory / "snapshot"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(self._path))
        self._listener.listen(128)
        self._round = _Round(-1)
        self._disk = DiskWriter(self._slots)
        threading.Thread(target=self._serve, name="slurm-elastic-snapshot-workers", daemon=True).start()

    def inventory(self) -> str:
        """Return what this agent holds; it has no workers now. Empty if nothing."""
        self._end_round()
        copies = tuple(sorted(self._held(), key=lambda copy: copy.id))
        if not copies:
            return ""
        if self._sender is None:
            try:
                self._sender = Sender(self._secret, self._run, self._slots)
            except OSError as error:
                logger.warning("%s cannot send snapshots to other nodes: %s", self._node, error)
        # With port 0 this node alone can use what it holds.
        port = self._sender.port if self._sender is not None else 0
        return lineage.write(Inventory(copies, Holder(self._address, port), self._node))

    def begin(self, round_: int, text: str, *, first: bool) -> dict[str, str]:
        """Prepare the memory for the workers of a round.

        Args:
            round_: Its number.
            text: Its origin.
            first: True for the agent of rank 0, which logs what all agents do.

        Returns:
            Variables for the environment of the workers.
        """
        self._end_round()
        origin = lineage.read_origin(text)
        if first:
            _log(round_, origin)
        held = [slot.contents() for slot in self._slots]
        plan = lineage.prepare([None if each is None else each.copy for each in held], origin)
        for slot in plan.clear:
            self._slots[slot].clear()
        current = self._round = _Round(round_, plan.slot, origin)
        self._disk.aim(None)
        if plan.fetch and plan.slot is not None:
            # The memory of what was there is given back before that of the other is taken.
            try:
                current.replacement = Slot.make()
                self._slots[plan.slot] = current.fetches = Slot.make()
            except OSError as error:
                current.fail(f"{self._node} has no memory for it: {error.strerror}")
                return {VARIABLE: str(self._path)}
            threading.Thread(
                target=self._fetch,
                args=(current, origin, current.fetches),
                name="slurm-elastic-snapshot-fetch",
                daemon=True,
            ).start()
        else:
            current.ready.set()
        return {VARIABLE: str(self._path)}

    def close(self, until: float | None = None, told_to_go: Callable[[], bool] = lambda: False) -> None:
        """Write the newest snapshot to disk if this agent does that, and let go of the memory. No workers run.

        Args:
            until: See :meth:`.DiskWriter.close`.
            told_to_go: See there.
        """
        self._end_round()
        self._disk.close(until, told_to_go)
        if self._sender is not None:
            self._sender.close()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)  # noqa: PTH108 (as the rest of this package, which workers import)
        for slot in self._slots:
            slot.close()

    def _held(self) -> list[Copy]:
        return [contents.copy for slot in self._slots if (contents := slot.contents()) is not None]

    def _end_round(self) -> None:
        """Cancel a transfer that is under way; it may go on for a moment, in memory that is not ours any more."""
        current = self._round
        current.cancelled.set()
        if current.slot is not None and current.replacement is not None and not current.ready.is_set():
            self._slots[current.slot] = current.replacement
        current.replacement = None
        current.ready.set()

    def _fetch(self, current: _Round, origin: Origin, slot: Slot) -> None:
        assert origin.copy is not None
        # Agents that come together ask different ones first.
        turn = zlib.crc32(self._agent.encode()) % max(1, len(origin.holders))
        holders = (*origin.holders[turn:], *origin.holders[:turn])
        try:
            receive(
                origin.copy,
                slot,
                tuple(self._slots),
                holders,
                self._secret,
                self._run,
                self._agent,
                current.cancelled.is_set,
            )
        except (TransferError, OutOfMemoryError) as error:
            current.fail(f"{self._node} cannot get it: {error}")
        finally:
            current.ready.set()

    def _serve(self) -> None:
        for connection in accepted(self._listener):
            threading.Thread(target=self._attend, args=(connection,), daemon=True).start()

    def _attend(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, ValueError, HandOverError):
            connection.settimeout(10.0)
            request = read_request(connection)
            current = self._round
            if request.round != current.number:
                answer(connection, Answer(error=f"round {request.round} is over"), [])
                return
            if request.directory is not None:
                self._disk.aim(_target(request.directory, current))
                answer(connection, Answer(), [])
                return
            current.ready.wait()
            if current.cancelled.is_set():
                answer(connection, Answer(error=f"round {request.round} is over"), [])
                return
            descriptors = [slot.descriptor for slot in self._slots]
            answer(connection, Answer(current.slot, current.error, current.origin.below), descriptors)


class _Round:
    """The preparation of the memory for one round.

    Attributes:
        number: Of the round.
        slot: Index of the slot from which its workers start; None if from none.
        origin: Of the round.
        fetches: The memory that a transfer writes; None if the snapshot is here.
        replacement: An empty slot that takes its place if the round ends before the transfer: made before, because
            there may be no descriptor left then, and the agent cannot wait for the other side.
        ready: Set when the slot has its snapshot, or will not have it.
        cancelled: Set when the round is over.
        error: Why the slot does not have it.
    """

    def __init__(self, number: int, slot: int | None = None, origin: Origin | None = None) -> None:
        self.number, self.slot, self.origin = number, slot, origin or Origin()
        self.fetches: Slot | None = None
        self.replacement: Slot | None = None
        self.ready, self.cancelled = threading.Event(), threading.Event()
        self.error = ""

    def fail(self, why: str) -> None:
        """Have the workers fail, unless the round is over: another state than that of the others is not theirs."""
        if not self.cancelled.is_set():
            self.error = why
            logger.error("the snapshot that round %d starts from: %s", self.number, why)
        self.ready.set()


def _target(directory: Directory, current: _Round) -> Target:
    copy = current.origin.copy
    origin = None
    if copy is not None and directory.origin is not None:
        origin = copy.id, CheckpointId(directory.origin, copy.id.step)
    return Target(directory.path, directory.every, directory.keep, directory.start, current.number, origin)


def _log(round_: int, origin: Origin) -> None:
    if origin.note:
        logger.warning("snapshots: %s", origin.note)
    if origin.copy is not None:
        step, taken = origin.copy.id.step, origin.copy.id.round
        logger.info(
            "the workers of round %d start from the snapshot of step %d, taken in round %d", round_, step, taken
        )
