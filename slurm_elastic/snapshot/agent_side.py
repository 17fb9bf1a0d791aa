"""The agent's side: keeps the memory over rounds, says what it holds, and has the origin of a round in place."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

from slurm_elastic.rendezvous.transport.messages import INVENTORY_LIMIT
from slurm_elastic.snapshot import lineage, transfer
from slurm_elastic.snapshot.disk.agent_side import DiskWriter, HeldSlots, Target
from slurm_elastic.snapshot.disk.lineage import CheckpointId
from slurm_elastic.snapshot.disk.stored import file_name
from slurm_elastic.snapshot.disk.writer import Fork
from slurm_elastic.snapshot.hand_over import (
    VARIABLE,
    Answer,
    Directory,
    HandOverError,
    Request,
    read_request,
    send,
)
from slurm_elastic.snapshot.lineage import ALONE, SLOTS, Copy, Group, Holder, Origin, Protection
from slurm_elastic.snapshot.memory import HEADER, OutOfMemoryError, Slot, copies_in, require_memory
from slurm_elastic.snapshot.replicator import Members, Participant, Replicator
from slurm_elastic.snapshot.sharding import Ranges, expected_ranges
from slurm_elastic.snapshot.state import read_layout
from slurm_elastic.snapshot.transfer import Settings, TransferError, accepted, receive, shut_down

logger = logging.getLogger("slurm_elastic")

_SETTLE = 30.0
"""Seconds at most for the copies of the newest parts when the workers have ended; others that fall silent end it."""


class _Round:
    """The preparation of the memory for one round, and what it holds for that.

    Attributes:
        slot: Index of the slot from which its workers start; None if from none.
        ready: Set when the slot has its snapshot, or will not have it, because of `error`.
        cancelled: Set when the round is over.
        borrowed: Memory with parts of the origin that other agents hold, until the workers have loaded them: by number
            and ranges.
        asked: Those of them that a worker has asked for.
        expected: Parts, with their ranges, that workers will probably ask for; empty if that is not known.
        collector: The agent that finds the next step to become safe, or to be written to disk; None if none does.
        writers: The slots of the local ranks that write parts.
        participant: Copies parts to another node, or reports them; None if neither is done.
    """

    def __init__(self, number: int, origin: Origin, group: Group, slot: int | None = None) -> None:
        self.number, self.origin, self.group, self.slot = number, origin, group, slot
        self.ready, self.cancelled = threading.Event(), threading.Event()
        self.error = ""
        self.borrowed: dict[tuple[int, Ranges | None], Future[Slot]] = {}
        self.asked: set[tuple[int, Ranges | None]] = set()
        self.expected: frozenset[tuple[int, Ranges | None]] = frozenset()
        self.collector: Holder | None = None
        self.writers: dict[int, Sequence[Slot]] = {}
        self.participant: Participant | None = None

    def fail(self, why: str) -> None:
        """Have the workers fail, unless the round is over: another state than that of the others is not theirs."""
        if not self.cancelled.is_set():
            self.error = why
            logger.error("the snapshot that round %d starts from: %s", self.number, why)
        self.ready.set()

    def start_thread(self, work: Callable[..., None], *arguments: object) -> None:
        """Do a part of the preparation in a thread of its own."""
        threading.Thread(target=work, args=(self, *arguments), name="slurm-elastic-snapshot-fetch", daemon=True).start()

    def log_origin(self) -> None:
        """Log the snapshot that the round starts from."""
        origin = self.origin
        if origin.note:
            logger.warning("snapshots: %s", origin.note)
        if origin.copy is not None:
            logger.info(
                "the workers of round %d start from the snapshot of step %d, taken in round %d%s",
                *(self.number, origin.copy.id.step, origin.copy.id.round),
                f", unless one up to step {origin.lost.step} is on disk" if origin.lost is not None else "",
            )


class AgentMemory:
    """The memory in which an agent keeps snapshots for the workers of later rounds. For the agent's main thread.

    Args:
        directory: That only this user can enter; the socket for workers is in it, and the caller removes both.
        replicates: True to have copies of parts on another node.
        slots: Number of snapshots that it holds.

    Raises:
        OSError: The memory or the socket cannot be made.
    """

    def __init__(
        self,
        directory: Path,
        settings: Settings,
        *,
        replicates: bool = False,
        slots: int = SLOTS,
        fewest_nodes: int = 1,
        fork: Fork | None = None,
    ) -> None:
        self._settings, self._node = settings, settings.node
        self._replicates, self._fewest_nodes = replicates, fewest_nodes
        self._slots = [Slot.make() for _ in range(slots)]
        self._parts: dict[int, list[Slot]] = {}
        """Slots for the parts of each local rank."""
        self._lock = threading.Lock()
        self._path = directory / "snapshot"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(self._path))
        self._listener.listen(128)
        self._round = _Round(-1, Origin(), ALONE)
        self._disk = DiskWriter(self._held_slots, fork)
        self._replicator = Replicator(settings, self._all_slots, self._disk)
        threading.Thread(target=self._serve, name="slurm-elastic-snapshot-workers", daemon=True).start()

    def inventory(self, is_leaving: Callable[[], bool] = lambda: False, *, members_leave: bool | None = None) -> str:
        """Return what this agent holds; it has no workers now. Empty if nothing.

        Args:
            is_leaving: Returns True if the agent is to leave, and so does not wait for copies.
            members_leave: True if the workers have stopped at a step because agents leave as announced; False if the
                round has ended although none does: a node has joined or was lost, or a worker has failed.
        """
        until = time.monotonic() + _SETTLE
        # The parts of agents that stay are here for the next round. What a lost node took after its last copy is gone,
        # and the parts of the others are of no use without it.
        self._settle(until, is_leaving, moves=members_leave is not False)
        if members_leave and self._round.participant is not None and not self._replicates:
            # The parts of those who leave are on disk alone.
            self._disk.flush(until, is_leaving)
        self._end_round()
        copies = [contents.copy for slot in self._all_slots() if (contents := slot.contents()) is not None]
        if not copies and not self._replicates:
            return ""
        try:
            holder = self._replicator.holder()
        except OSError as error:
            logger.warning("%s cannot send snapshots to other nodes: %s", self._node, error)
            # With port 0 this node alone can use what it holds.
            holder = Holder(self._settings.address, 0)
        return lineage.take_inventory(copies, holder, self._node, INVENTORY_LIMIT, replicates=self._replicates)

    def begin(self, round_: int, text: str, group: Group) -> dict[str, str]:
        """Prepare the memory for the workers of a round, by its origin; returns variables for their environment."""
        self._end_round()
        if self._round.participant is not None:
            self._round.participant.abandon()
        origin = lineage.read_origin(text)
        for held in self._all_slots():
            if (contents := held.contents()) is not None and not origin.keeps(contents.copy):
                held.clear()
        slot, fetch = lineage.prepare(copies_in(self._slots), origin)
        current = self._round = _Round(round_, origin, group, slot)
        current.collector = origin.collector if self._replicates else None
        if group.rank == 0:
            current.log_origin()
        # Nothing is to be taken yet.
        protection = Protection(origin.protected)
        for slots in (self._slots, *self._parts.values()):
            slots[0].protection = protection if self._replicates else Protection()
        self._disk.aim(None)
        if fetch and slot is not None:
            # The memory of what was there is given back before that of the other is taken.
            try:
                self._slots[slot], coming = Slot.make(), Slot.make()
            except OSError as error:
                current.fail(f"{self._node} has no memory for it: {error.strerror}")
                return {VARIABLE: str(self._path)}
            current.start_thread(self._fetch, origin.copy, coming, slot)
        else:
            current.ready.set()
            if slot is not None and origin.copy is not None and origin.copy.parts:
                current.start_thread(self._fetch_parts, self._slots[slot])
        return {VARIABLE: str(self._path)}

    def held(self) -> tuple[int, int | None]:
        """Return the bytes of all slots, and the newest step of which other nodes have copies; from any thread."""
        safe = self._replicator.safe if self._replicates else None
        with self._lock:
            loans = [loan for loan in self._round.borrowed.values() if loan.done() and loan.exception() is None]
        size = sum(slot.size - HEADER for slot in self._all_slots()) + sum(loan.result().allocated for loan in loans)
        return size, None if safe is None else safe.step

    def close(self, until: float | None = None, is_leaving: Callable[[], bool] = lambda: False) -> str:
        """Write the newest snapshot to disk if this agent does that, and let go of the memory. No workers run.

        See :meth:`.DiskWriter.close`.
        """
        if until is not None:
            # Others go on without this agent.
            self._settle(until, lambda: False, moves=True, leaving=True)
        self._end_round()
        missing = self._disk.close(until, is_leaving)
        self._replicator.close()
        shut_down(self._listener)
        self._listener.close()
        # Each slot is gone with the last thread that uses it.
        with self._lock:
            self._slots = []
            self._parts.clear()
            self._replicator.replicas.clear()
        return missing

    def _held_slots(self) -> HeldSlots:
        with self._lock:
            parts, replicas = (
                [slot for slots in [*groups.values()] for slot in slots]
                for groups in (self._parts, self._replicator.replicas)
            )
            return HeldSlots(tuple(self._slots), parts, replicas)

    def _all_slots(self) -> tuple[Slot, ...]:
        return tuple(slot for slots in self._held_slots() for slot in slots)

    def _settle(self, until: float, is_leaving: Callable[[], bool], *, moves: bool, leaving: bool = False) -> None:
        """Wait until the newest parts are where they are needed, if this agent leaves or others do."""
        participant = self._round.participant
        if participant is not None and participant.end(moves=moves) and self._replicates and moves:
            self._replicator.settle(participant, leaving=leaving, until=until, is_leaving=is_leaving)

    def _replicate(self, current: _Round) -> None:
        """Have the parts of local ranks copied to another node, or reported, from now on."""
        with self._lock:
            if current.collector is None or not current.writers or current.participant is not None:
                return
            safe = current.origin.protected if self._replicates else None
            members = Members(current.number, current.group, current.collector, safe, self._replicates)
            current.participant = self._replicator.begin(members, [*self._slots], current.writers)

    def _end_round(self) -> None:
        """Cancel a transfer that is under way; it may go on for a moment, in memory that no slot of ours has."""
        current = self._round
        with self._lock:
            current.cancelled.set()
            current.borrowed.clear()
        current.ready.set()

    def _fetch(self, current: _Round, copy: Copy, slot: Slot, index: int) -> None:
        try:
            receive(transfer.Request(copy), slot, current.origin.holders, self._settings, current.cancelled.is_set)
            with self._lock:
                if current.cancelled.is_set():
                    return
                self._slots[index] = slot
                slots = tuple(self._slots)
        except (TransferError, OutOfMemoryError) as error:
            current.fail(f"{self._node} cannot get it: {error}")
            return
        finally:
            current.ready.set()
        if copy.parts:
            self._fetch_parts(current, slot)
        # Beside the start of the workers, which else wait for it at their first snapshot, and then say if it fails.
        with contextlib.suppress(OutOfMemoryError):
            require_memory(slot.size, slots)

    def _fetch_parts(self, current: _Round, slot: Slot) -> None:
        """Get what workers will probably ask for, while they start: their models may take as long as the transfer."""
        contents, group = slot.contents(), current.group
        if contents is None:
            return
        description = bytes(slot.memory()[HEADER + contents.tensors : contents.size])
        layout = read_layout(description) if slot.contents() == contents else None
        if layout is None:
            return
        ranks = range(group.base_rank, group.base_rank + group.workers)
        expected = [expected_ranges(layout, rank, group.world) for rank in ranks]
        with self._lock:
            current.expected = frozenset(part for by_holder in expected for part in by_holder.items())
        for part, ranges in current.expected:
            if current.cancelled.is_set() or not current.expected:
                return
            with contextlib.suppress(HandOverError):
                self._part(current, part, ranges)

    def _part(self, current: _Round, part: int, ranges: Ranges | None, *, asked: bool = False) -> Slot:
        """Return memory with a part of the origin, or with these ranges of it, see `receive`; waits until it is there.

        `asked` is true if a worker asks for it. Raises HandOverError if it cannot be had.
        """
        origin = current.origin
        if origin.copy is None or not 0 <= part < origin.copy.parts:
            raise HandOverError(f"the snapshot that round {current.number} starts from has no part {part}")
        copy = Copy.of_part(origin.copy.id, part, origin.copy.parts)
        for slot in self._all_slots():
            if (contents := slot.contents()) is not None and contents.copy == copy:
                return slot
        key = part, ranges
        with self._lock:
            loan = current.borrowed.get(key)
            first = loan is None
            if loan is None:
                # What ranks had of their own, without any shards, is not foreseen.
                if asked and ranges != () and current.expected and key not in current.expected:
                    # What they need was not foreseen, and the memory of what no worker has asked for may be needed.
                    current.expected = frozenset()
                    for unasked in current.borrowed.keys() - current.asked:
                        del current.borrowed[unasked]
                loan = current.borrowed[key] = Future()
            if asked:
                current.asked.add(key)
        if first:
            try:
                slot, holders, over = Slot.make(), origin.holders_of(part), current.cancelled.is_set
                receive(transfer.Request(copy, ranges), slot, holders, self._settings, over)
                loan.set_result(slot)
            except Exception as error:
                loan.set_exception(HandOverError(f"{self._node} cannot get part {part} of it: {error}"))
        return loan.result()

    def _serve(self) -> None:
        for connection in accepted(self._listener):
            threading.Thread(target=self._attend, args=(connection,), daemon=True).start()

    def _attend(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, ValueError):
            connection.settimeout(10.0)
            request = read_request(connection)
            slots: Sequence[Slot] = ()
            try:
                answered, slots = self._answered(request, self._round)
            except OSError as error:
                answered = Answer(error=str(error))
            send(connection, answered, () if answered.error else slots)

    def _answered(self, request: Request, current: _Round) -> tuple[Answer, Sequence[Slot]]:
        if request.round == current.number and request.directory is not None:
            self._write_to(request.directory, current)
            return Answer(collector=self._find_steps(request.directory, current)), ()
        if request.round == current.number:
            current.ready.wait()
        if request.round != current.number or current.cancelled.is_set():
            raise HandOverError(f"round {request.round} is over")
        slots, origin = self._wanted(request, current), current.origin
        more = self.held()[0], self._replicates, self._fewest_nodes
        return Answer(current.slot, current.error, origin.below, origin.lost, None, *more), slots

    def _write_to(self, directory: Directory, current: _Round) -> None:
        """Write the snapshots of a round to disk."""
        if directory.checkpoint is not None and current.group.rank == 0:
            logger.info(
                "the workers of round %d start from the checkpoint %s of %s",
                *(current.number, file_name(CheckpointId(*directory.checkpoint)), directory.path),
            )
        copy = current.origin.copy
        origin = copy.id if copy is not None and directory.origin else None
        self._disk.aim(Target(directory, current.number, current.group, origin))

    def _find_steps(self, directory: Directory, current: _Round) -> Holder | None:
        """Have steps found that all agents keep for the disk; returns the agent that finds them."""
        if self._replicates or not directory.has_parts or current.group.nodes == 1:
            return None
        collector = directory.collector
        if current.group.rank == 0:
            try:
                collector = self._replicator.holder()
            except OSError as error:
                # Training goes on, and memory holds the snapshots.
                logger.warning("shards get to disk only when the workers end: %s", error)
        current.collector = collector
        self._replicate(current)
        return collector

    def _wanted(self, request: Request, current: _Round) -> Sequence[Slot]:
        if request.part is not None:
            return [self._part(current, request.part, request.ranges, asked=True)]
        if request.writes is not None:
            with self._lock:
                if request.writes not in self._parts:
                    self._parts[request.writes] = [Slot.make() for _ in self._slots]
                slots = current.writers[request.writes] = self._parts[request.writes]
                # Its first snapshot: what was fetched for the start of the round is loaded, the rest is not needed.
                current.borrowed.clear()
                current.expected = frozenset()
            self._replicate(current)
            return slots
        return self._slots
