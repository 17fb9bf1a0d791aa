"""The agent's side: keeps the memory over rounds, says what it holds, and has the origin of a round in place."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

from slurm_elastic.rendezvous.transport.messages import INVENTORY_LIMIT
from slurm_elastic.snapshot import lineage
from slurm_elastic.snapshot._child_process import Fork
from slurm_elastic.snapshot.agent_round import Borrowed, Group, RoundSnapshots, log_origin, start_thread, target_of
from slurm_elastic.snapshot.disk.agent_side import DiskWriter, HeldSlots
from slurm_elastic.snapshot.hand_over import (
    MOST_RANGES,
    VARIABLE,
    Answer,
    Directory,
    HandOverError,
    Request,
    answer,
    read_request,
)
from slurm_elastic.snapshot.lineage import SLOTS, Copy, Holder, Origin, Protection
from slurm_elastic.snapshot.memory import OutOfMemoryError, Slot, copies_in, require_memory
from slurm_elastic.snapshot.replicator import Ended, Members, ReplicatorProcess, Settings, Slots, Wanted
from slurm_elastic.snapshot.sharding import expected_ranges
from slurm_elastic.snapshot.slots import HEADER
from slurm_elastic.snapshot.state import read_layout
from slurm_elastic.snapshot.transfer import Ranges, Sender, TransferError, accepted, receive

logger = logging.getLogger("slurm_elastic")

_SETTLE = 30.0
"""Seconds at most for the copies of the newest parts when the workers have ended; others that fall silent end it."""


class AgentMemory:
    """The memory in which an agent keeps snapshots for the workers of later rounds. For the agent's main thread.

    Args:
        directory: That only this user can enter; the socket for workers is made in it.
        secret: Of the run.
        run: Name of the incarnation.
        agent: Identity of this agent.
        node: Of this agent.
        address: At which other agents reach this one.
        replicates: True to have copies of parts on another node.
        slots: Number of snapshots that it holds of the state of all ranks, and of each rank's parts.
        silence: See :class:`.replicator.Settings`.
        fewest_nodes: Number of nodes that a round has at least.
        domain: Failure domain of the agent: copies go to another one.
        fork: See :class:`.WriterProcess`.

    Raises:
        OSError: The memory or the socket cannot be made.
    """

    def __init__(
        self,
        directory: Path,
        secret: bytes,
        run: str,
        agent: str,
        node: str,
        address: str,
        *,
        replicates: bool = False,
        slots: int = SLOTS,
        silence: float = 1.0,
        fewest_nodes: int = 1,
        domain: str = "",
        fork: Fork | None = None,
    ) -> None:
        self._fewest_nodes = fewest_nodes
        self._secret, self._run, self._agent, self._node, self._address = secret, run, agent, node, address
        self._slots = [Slot.make() for _ in range(slots)]
        self._parts: dict[int, list[Slot]] = {}
        """Slots for the parts of each local rank."""
        self._replicas: dict[int, list[Slot]] = {}
        """Slots for copies of the parts of each local rank of another agent."""
        self._replicates = replicates
        self._settings = Settings(secret, run, agent, node, address, silence, domain)
        self._replicator: ReplicatorProcess | None = None
        """Copies parts to other nodes; without that it finds the steps that agents write to disk, if they do."""
        self._lock = threading.Lock()
        self._sender: Sender | None = None
        self._path = directory / "snapshot"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(self._path))
        self._listener.listen(128)
        self._round = RoundSnapshots(-1)
        self._disk = DiskWriter(self._held_slots, self._ask_for_step, fork)
        if replicates:
            self._replicator = self._make_replicator()
        threading.Thread(target=self._serve, name="slurm-elastic-snapshot-workers", daemon=True).start()

    def inventory(
        self, is_leaving: Callable[[], bool] = lambda: False, *, members_leave: bool = False, members_stay: bool = False
    ) -> str:
        """Return what this agent holds; it has no workers now. Empty if nothing.

        Args:
            is_leaving: Returns True if the agent is to leave, and so does not wait for copies.
            members_leave: True if the workers have stopped at a step because agents leave as announced.
            members_stay: True if the round has ended although no agent leaves: a node has joined or was lost, or a
                worker has failed.
        """
        until = time.monotonic() + _SETTLE
        # The parts of agents that stay are here for the next round. What a lost node took after its last copy is gone,
        # and the parts of the others are of no use without it.
        self._settle(until, is_leaving, moves=not members_stay)
        if members_leave and self._round.reports and not self._replicates:
            # The parts of those who leave are on disk alone.
            self._disk.flush(until, is_leaving)
        self._end_round()
        copies = [contents.copy for slot in self._all_slots() if (contents := slot.contents()) is not None]
        if not copies and not self._replicates:
            return ""
        if self._sender is None:
            try:
                self._sender = Sender(self._secret, self._run, self._all_slots, self._port_of_replicator)
            except OSError as error:
                logger.warning("%s cannot send snapshots to other nodes: %s", self._node, error)
        # With port 0 this node alone can use what it holds.
        port = self._sender.port if self._sender is not None else 0
        holder = Holder(self._address, port)
        return lineage.take_inventory(copies, holder, self._node, INVENTORY_LIMIT, replicates=self._replicates)

    def begin(self, round_: int, text: str, *, first: bool, group: Group | None = None) -> dict[str, str]:
        """Prepare the memory for the workers of a round.

        Args:
            round_: Its number.
            text: Its origin.
            first: True for the agent of rank 0, which logs what all agents do.
            group: The place of this agent among those of the round; None to copy no parts to other nodes.

        Returns:
            Variables for the environment of the workers.
        """
        self._end_round()
        origin = lineage.read_origin(text)
        if first:
            log_origin(round_, origin)
        plan = lineage.prepare(copies_in(self._slots), origin)
        for slot in plan.clear:
            self._slots[slot].clear()
        for slots in (*self._parts.values(), *self._replicas.values()):
            for slot in lineage.off_line(copies_in(slots), origin):
                slots[slot].clear()
        current = self._round = RoundSnapshots(round_, plan.slot, origin)
        current.group = group
        # Nothing is to be taken yet.
        protection = Protection(origin.protected)
        for slots in (self._slots, *self._parts.values()):
            slots[0].protection = protection if self._replicates else Protection()
        self._disk.aim(None)
        if plan.fetch and plan.slot is not None:
            # The memory of what was there is given back before that of the other is taken.
            try:
                current.replacement = Slot.make()
                self._slots[plan.slot] = current.fetches = Slot.make()
            except OSError as error:
                current.fail(f"{self._node} has no memory for it: {error.strerror}")
                return {VARIABLE: str(self._path)}
            start_thread(current, self._fetch, origin, current.fetches)
        else:
            current.ready.set()
            if plan.slot is not None and group is not None and origin.copy is not None and origin.copy.parts:
                start_thread(current, self._fetch_parts, group, self._slots[plan.slot])
        return {VARIABLE: str(self._path)}

    def held(self) -> tuple[int, int | None]:
        """Return the bytes of all slots, and the newest step of which other nodes have copies; from any thread."""
        safe = None if self._replicator is None or not self._replicates else self._replicator.safe
        size = 0
        # The agent may be closing.
        with contextlib.suppress(OSError):
            with self._lock:
                borrowed = [loan.slot for loan in self._round.borrowed.values() if loan.slot is not None]
            size = sum(slot.size - HEADER for slot in self._all_slots()) + sum(slot.allocated for slot in borrowed)
        return size, None if safe is None else safe.step

    def close(self, until: float | None = None, is_leaving: Callable[[], bool] = lambda: False) -> str:
        """Write the newest snapshot to disk if this agent does that, and let go of the memory. No workers run.

        Returns:
            See :meth:`.DiskWriter.close`.

        Args:
            until: See :meth:`.DiskWriter.close`.
            is_leaving: See there.
        """
        if until is not None:
            # Others go on without this agent.
            self._settle(until, lambda: False, moves=True, leaving=True)
        self._end_round()
        missing = self._disk.close(until, is_leaving)
        if self._replicator is not None:
            self._replicator.close()
        if self._sender is not None:
            self._sender.close()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)  # noqa: PTH108 (as the rest of this package, which workers import)
        for slot in self._all_slots():
            slot.close()
        return missing

    def _all_slots(self) -> tuple[Slot, ...]:
        with self._lock:
            parts = (*self._parts.values(), *self._replicas.values())
            return (*self._slots, *(slot for slots in parts for slot in slots))

    def _add_replicas(self, local_rank: int, slots: list[Slot]) -> None:
        with self._lock:
            self._replicas[local_rank] = slots

    def _held_slots(self) -> HeldSlots:
        with self._lock:
            parts = [slot for slots in self._parts.values() for slot in slots]
            return HeldSlots(tuple(self._slots), parts, [slot for slots in self._replicas.values() for slot in slots])

    def _make_replicator(self) -> ReplicatorProcess:
        return ReplicatorProcess(self._settings, self._add_replicas, self._disk.agree)

    def _ask_for_step(self) -> None:
        if self._replicator is not None:
            with contextlib.suppress(OSError):
                self._replicator.order(Wanted())

    def _port_of_replicator(self) -> int:
        if self._replicator is None or not self._replicates:
            raise OSError("no parts are copied to other nodes")
        return self._replicator.port()

    def _settle(self, until: float, is_leaving: Callable[[], bool], *, moves: bool, leaving: bool = False) -> None:
        """Wait until the newest parts are where they are needed, if this agent leaves or others do."""
        current = self._round
        if self._replicator is None or not current.reports or current.settled:
            return
        current.settled = True
        with contextlib.suppress(OSError):
            self._replicator.order(Ended(moves))
            if self._replicates and moves:
                self._replicator.settle(current.number, leaving=leaving, until=until, is_leaving=is_leaving)

    def _replicate(self, current: RoundSnapshots, local_rank: int, slots: Sequence[Slot]) -> None:
        """Have the parts of a local rank copied to another node, or reported, from now on."""
        collector = current.origin.collector if self._replicates else current.collector
        if self._replicator is None or current.group is None or collector is None:
            return
        group = current.group
        try:
            with self._lock:
                first, current.reports = not current.reports, True
            if first:
                safe = current.origin.protected if self._replicates else None
                order = Members(
                    current.number, group.rank, group.nodes, group.workers, collector, safe, self._replicates
                )
                self._replicator.order(order)
                self._replicator.order(Slots(None), self._slots)
            self._replicator.order(Slots(local_rank), slots)
        except OSError as error:
            logger.warning("%s copies no snapshots to another node: %s", self._node, error)

    def _end_round(self) -> None:
        """Cancel a transfer that is under way; it may go on for a moment, in memory that is not ours any more."""
        current = self._round
        current.cancelled.set()
        if current.slot is not None and current.replacement is not None and not current.ready.is_set():
            self._slots[current.slot] = current.replacement
        current.replacement = None
        current.ready.set()
        with self._lock:
            current.borrowed.clear()

    def _fetch(self, current: RoundSnapshots, origin: Origin, slot: Slot) -> None:
        assert origin.copy is not None
        slots = tuple(self._slots)
        try:
            self._receive(current, origin.copy, slot, slots, origin.holders)
        except (TransferError, OutOfMemoryError) as error:
            current.fail(f"{self._node} cannot get it: {error}")
            return
        finally:
            current.ready.set()
        if current.group is not None and origin.copy.parts:
            self._fetch_parts(current, current.group, slot)
        # Beside the start of the workers, which else wait for it at their first snapshot, and then say if it fails.
        with contextlib.suppress(OutOfMemoryError):
            require_memory(slot.size, slots)

    def _fetch_parts(self, current: RoundSnapshots, group: Group, slot: Slot) -> None:
        """Get what workers will probably ask for, while they start: their models may take as long as the transfer."""
        contents = slot.contents()
        if contents is None:
            return
        description = bytes(slot.memory()[HEADER + contents.tensors : contents.size])
        layout = read_layout(description) if slot.contents() == contents else None
        if layout is None:
            return
        ranks = range(group.base_rank, group.base_rank + group.workers)
        expected = [expected_ranges(layout, rank, group.world, MOST_RANGES) for rank in ranks]
        with self._lock:
            current.expected = frozenset(part for by_holder in expected for part in by_holder.items())
        for part, ranges in current.expected:
            if current.cancelled.is_set() or not current.expected:
                return
            with contextlib.suppress(HandOverError):
                self._part(current, part, own=False, ranges=ranges)

    def _receive(
        self,
        current: RoundSnapshots,
        copy: Copy,
        slot: Slot,
        slots: tuple[Slot, ...],
        holders: tuple[Holder, ...],
        own: bool = False,
        ranges: Ranges | None = None,
    ) -> None:
        # Agents that come together ask different ones first.
        turn = zlib.crc32(self._agent.encode()) % max(1, len(holders))
        holders = (*holders[turn:], *holders[:turn])
        cancelled = current.cancelled.is_set
        sender = self._secret, self._run, self._agent
        receive(copy, slot, slots, holders, *sender, cancelled, own=own, ranges=ranges)

    def _slots_of_rank(self, local_rank: int) -> list[Slot]:
        """Return the slots for the parts of a local rank; made when it asks for the first time."""
        with self._lock:
            if local_rank not in self._parts:
                self._parts[local_rank] = [Slot.make() for _ in self._slots]
            return self._parts[local_rank]

    def _part(
        self, current: RoundSnapshots, part: int, own: bool, ranges: Ranges | None, *, asked: bool = False
    ) -> Slot:
        """Return memory with a part of the origin, or with these ranges of it; waits until it is there.

        Args:
            current: The round.
            part: Number of the part.
            own: True to get it without its shards.
            ranges: See :func:`.transfer.receive`.
            asked: True if a worker asks for it.

        Raises:
            HandOverError: It cannot be had.
        """
        origin = current.origin
        if origin.copy is None or not 0 <= part < origin.copy.parts:
            raise HandOverError(f"the snapshot that round {current.number} starts from has no part {part}")
        copy = Copy.of_part(origin.copy.id, part, origin.copy.parts)
        for slot in self._all_slots():
            if (contents := slot.contents()) is not None and contents.copy == copy:
                return slot
        with self._lock:
            borrowed = current.borrowed.get((part, own, ranges))
            first = borrowed is None
            if borrowed is None:
                if asked and not own and current.expected and (part, ranges) not in current.expected:
                    current.drop_expected()
                borrowed = current.borrowed[part, own, ranges] = Borrowed()
            borrowed.asked |= asked
        if first:
            try:
                slot = Slot.make()
                self._receive(current, copy, slot, (slot,), origin.holders_of(part), own, ranges)
                borrowed.slot = slot
            except (TransferError, OutOfMemoryError, OSError) as error:
                borrowed.error = f"{self._node} cannot get part {part} of it: {error}"
            finally:
                borrowed.ready.set()
        borrowed.ready.wait()
        if borrowed.slot is None:
            raise HandOverError(borrowed.error)
        return borrowed.slot

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
                if request.directory.checkpoint:
                    logger.info(
                        "the workers of round %d start from the checkpoint %s of %s",
                        *(request.round, request.directory.checkpoint, request.directory.path),
                    )
                self._disk.aim(target_of(request.directory, current))
                answer(connection, Answer(collector=self._find_steps(request.directory, current)), [])
                return
            current.ready.wait()
            if current.cancelled.is_set():
                answer(connection, Answer(error=f"round {request.round} is over"), [])
                return
            try:
                slots = self._wanted(request, current)
            except (HandOverError, OSError) as error:
                answer(connection, Answer(error=str(error)), [])
                return
            descriptors = [slot.descriptor for slot in slots]
            copies, _ = self.held()
            origin = current.origin
            answered = Answer(
                current.slot,
                current.error,
                origin.below,
                origin.lost,
                held=copies,
                replicates=self._replicates,
                fewest_nodes=self._fewest_nodes,
            )
            answer(connection, answered, descriptors)

    def _find_steps(self, directory: Directory, current: RoundSnapshots) -> Holder | None:
        """Have steps found that all agents keep for the disk; returns the process that finds them if it is ours."""
        group = current.group
        if self._replicates or not directory.has_parts or group is None or group.nodes == 1:
            return None
        self._replicator = self._replicator or self._make_replicator()
        collector = directory.collector
        if directory.first:
            try:
                collector = Holder(self._address, self._replicator.port())
            except OSError as error:
                # Training goes on, and memory holds the snapshots.
                logger.warning("shards get to disk only when the workers end: %s", error)
        current.collector = collector
        with self._lock:
            writers = dict(current.writers)
        for local_rank, slots in writers.items():
            self._replicate(current, local_rank, slots)
        return collector

    def _wanted(self, request: Request, current: RoundSnapshots) -> Sequence[Slot]:
        if request.part is not None:
            return [self._part(current, request.part, request.own, request.ranges, asked=True)]
        if request.writes is not None:
            # Its first snapshot: what was fetched for the start of the round is loaded.
            slots = self._slots_of_rank(request.writes)
            with self._lock:
                current.borrowed.clear()
                # Nor is the rest of it needed any more.
                current.expected = frozenset()
                current.writers[request.writes] = slots
            self._replicate(current, request.writes, slots)
            return slots
        return self._slots
