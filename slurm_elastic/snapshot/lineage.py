"""Decides which snapshot the next round starts from. Pure.

The leader calls :func:`choose` with the inventories of all agents that wait for a place, spares included, and writes
the result, the origin, into the record of the round. Membership takes both as text. Off-lineage state stays out: what
is taken in a round descends from its origin, and the line of an origin has, for each round before, the last step from
which the state of the run went on. A snapshot needs agents that together hold each of its parts, and one copy of the
state of all ranks; copies whose digests differ are of ranks whose plain values differ, and are not chosen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import msgspec

from slurm_elastic import typed_json

SLOTS = 3
"""Snapshots that an agent holds: the newest two stay committed while a worker writes the third. An agent that is asked
for two holds the newest one then; the decisions here take any number from two on."""
REPLICA_SLOTS = 2
"""Copies of one rank's parts from another node: the newest that is safe, and the one that comes."""

_T = TypeVar("_T")

_HOLDERS = 8
"""Agents that an origin names as sources of its snapshot."""
_LINE = 16
"""Rounds that a line reaches back. Memory holds snapshots of the last three that saved."""


@dataclass(frozen=True, slots=True, order=True)
class SnapshotId:
    """The round in which a snapshot was taken, and the script's own count of steps."""

    round: int
    step: int


_NOTHING = SnapshotId(-1, 0)
"""Sorts before every snapshot."""


@dataclass(frozen=True, slots=True)
class Copy:
    """A committed snapshot in the memory of an agent, or one part of it.

    Attributes:
        digest: Of its layout and plain values; zeros for a part.
        parts: Number of parts that the snapshot has.
        part: Number of the part; None for the state of all ranks.
    """

    id: SnapshotId
    digest: str
    parts: int = 0
    part: int | None = None

    @classmethod
    def of_part(cls, snapshot: SnapshotId, part: int, parts: int) -> Copy:
        """Return the copy of a part."""
        return cls(snapshot, "0" * 16, parts, part)


@dataclass(frozen=True, slots=True)
class Holder:
    """The address and port at which an agent sends its snapshots to other agents of the run."""

    address: str
    port: int


@dataclass(frozen=True, slots=True)
class Group:
    """The rank of an agent among those of a round, and the global rank of its first worker among those of all."""

    rank: int
    nodes: int
    workers: int
    base_rank: int
    world: int


ALONE = Group(0, 1, 1, 0, 1)
"""That of a process without an agent."""


@dataclass(frozen=True, slots=True)
class HeldParts:
    """The parts of one snapshot that an agent holds, as first and last numbers of ranges."""

    id: SnapshotId
    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Inventory:
    """The snapshots that an agent holds, the parts of snapshots, and where other agents get them.

    `replicates` is true if it has copies of parts on another node.
    """

    copies: tuple[Copy, ...]
    holder: Holder
    node: str = ""
    parts: tuple[HeldParts, ...] = ()
    replicates: bool = False


@dataclass(frozen=True, slots=True)
class Source:
    """An agent that holds parts of an origin, as first and last numbers of ranges."""

    holder: Holder
    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Origin:
    """The start of a round.

    Attributes:
        copy: The snapshot that all workers start from; None if no snapshot can be had.
        holders: Agents that hold it.
        line: The last snapshot on the line of each round so far, oldest first; the last entry is the snapshot itself.
        note: Why a newer snapshot was not chosen; empty if there was none.
        below: The step of a state from which workers failed, if the round starts from disk because of that: no
            checkpoint of that step or later is used. None if not.
        sources: Agents that hold the parts of the snapshot.
        lost: A newer snapshot, parts of which no agent that is left holds: if it is on disk, or one between, the round
            starts from that. None if there is none.
        collector: The agent that finds the next step to become safe; None if parts are not copied to other nodes.
    """

    copy: Copy | None = None
    holders: tuple[Holder, ...] = ()
    line: tuple[SnapshotId, ...] = ()
    note: str = ""
    below: int | None = None
    sources: tuple[Source, ...] = ()
    collector: Holder | None = None
    lost: SnapshotId | None = None
    safe: SnapshotId | None = None

    @property
    def protected(self) -> SnapshotId | None:
        """The snapshot that agents keep until a step of the round is safe; None if the round starts from none."""
        return self.safe or (None if self.copy is None else self.copy.id)

    def holders_of(self, part: int) -> tuple[Holder, ...]:
        """Return the agents that hold a part of the snapshot."""
        return tuple(
            source.holder for source in self.sources if any(first <= part <= last for first, last in source.ranges)
        )

    def has(self, snapshot: SnapshotId) -> bool:
        """Return True if the snapshot is on the line."""
        return any(snapshot.round == last.round and snapshot.step <= last.step for last in self.line)

    def keeps(self, copy: Copy) -> bool:
        """Return True if an agent keeps a copy for the round: it is on the line.

        One whose plain values differ from those of the snapshot itself is not the one that the round starts from.
        """
        differs = self.copy is not None and copy.part is None and copy.id == self.copy.id and copy != self.copy
        return self.has(copy.id) and not differs


def choose(last_round: int | None, before: str, inventories: Sequence[str], failed: bool = False) -> str:
    """Return the origin of the next round; empty if it starts from no snapshot and there is nothing to say about that.

    Args:
        last_round: Of this incarnation; None before the first.
        before: The origin of that round.
        inventories: What the agents that wait for a place hold; one that cannot be read counts as empty.
        failed: True if the last round ended because a worker failed. If it took no snapshot, the state that it started
            from may be why: then the next round starts from an older snapshot.
    """
    present = read_inventories(inventories)
    collector = next(
        (inventory.holder for inventory in present if inventory.replicates and inventory.holder.port), None
    )
    choice = _chosen(last_round, read_origin(before), present, failed)
    choice = replace(choice, collector=collector, safe=None if collector is None else _safe(choice, present))
    return "" if choice == Origin() else write(choice)


def _chosen(last_round: int | None, line: Origin, present: Sequence[Inventory], failed: bool) -> Origin:
    if last_round is None or (line.copy is None and not present):
        return Origin()
    copies: dict[SnapshotId, dict[Copy, list[Inventory]]] = {}
    for inventory in present:
        for copy in inventory.copies:
            # An agent that was away may hold the origin with other plain values than those that the round started from.
            if copy.id.round == last_round or line.keeps(copy):
                copies.setdefault(copy.id, {}).setdefault(copy, []).append(inventory)
    note, uncovered, lost = "", "", None
    again = failed and line.copy is not None and all(snapshot.round != last_round for snapshot in copies)
    for snapshot in sorted(copies, reverse=True):
        if again and line.copy is not None and snapshot >= line.copy.id:
            started = f"step {snapshot.step} of round {snapshot.round}"
            note = f"workers that started from {started} failed before the next snapshot"
            continue
        by_copy = copies[snapshot]
        if len(by_copy) > 1:
            note = note or _differs(snapshot, by_copy)
            continue
        ((copy, inventories),) = by_copy.items()
        sources = _sources(snapshot, present) if copy.parts else ()
        if missing := _missing(copy.parts, sources):
            # The newest step is often not complete on all ranks, and the one before is.
            uncovered = uncovered or _uncovered(copy, missing, any(inventory.replicates for inventory in present))
            lost = lost or snapshot
            continue
        kept = tuple(last for last in line.line if last.round < snapshot.round)
        holders = tuple(inventory.holder for inventory in inventories[:_HOLDERS])
        if copy.parts and line.copy is not None and snapshot.round != last_round and not again:
            # Nothing is left of what the round took or started from, which may have been on disk.
            newer = (bound for bound in (lost, line.lost, line.copy.id) if bound is not None and bound > snapshot)
            lost = max(newer, default=None)
        return Origin(copy, holders, (*kept, snapshot)[-_LINE:], note, sources=sources, lost=lost)
    note = note or uncovered
    if line.copy is not None and not note:
        note = f"no agent that is left holds a snapshot since step {line.copy.id.step} of round {line.copy.id.round}"
    below = line.copy.id.step if again and line.copy is not None else None
    return Origin(note=f"{note}; it starts from no snapshot", below=below) if note else Origin()


def prepare(copies: Sequence[Copy | None], origin: Origin) -> tuple[int | None, bool]:
    """Return the slot of an agent that the workers of a round start from, None if from no snapshot.

    The second value is true if another agent has to send the snapshot for that slot first. `copies` are the committed
    snapshots of the slots, of those that the agent keeps.
    """
    if origin.copy is None:
        return None, False
    if origin.copy in copies:
        return copies.index(origin.copy), False
    kept = [None if copy is None else copy.id for copy in copies]
    return slot_to_write(kept, (), Protection(origin.protected)), True


def take_inventory(copies: Iterable[Copy], holder: Holder, node: str, limit: int, *, replicates: bool = False) -> str:
    """Return the inventory of an agent as text; empty if it holds nothing and has no copies on other nodes.

    `holder` is where other agents get it. The oldest snapshots are left out where it has more than `limit` characters.
    """
    whole: list[Copy] = []
    parts: dict[SnapshotId, set[int]] = {}
    for copy in copies:
        if copy.part is None:
            whole.append(copy)
        else:
            parts.setdefault(copy.id, set()).add(copy.part)
    snapshots = sorted({copy.id for copy in whole} | parts.keys())
    while snapshots or replicates:
        inventory = Inventory(
            tuple(sorted((copy for copy in whole if copy.id in snapshots), key=lambda copy: copy.id)),
            holder,
            node,
            tuple(HeldParts(snapshot, _ranges(parts[snapshot])) for snapshot in snapshots if snapshot in parts),
            replicates,
        )
        if len(text := write(inventory)) <= limit or not snapshots:
            return text
        snapshots.pop(0)
    return ""


@dataclass(frozen=True, slots=True)
class Protection:
    """The snapshots that are not overwritten while parts of snapshots are copied to other nodes.

    Attributes:
        safe: The newest snapshot that is safe: other nodes hold copies of all its parts. None if there is none.
        take: The first snapshot from this one on is the next to become safe; None if none is wanted yet.
    """

    safe: SnapshotId | None = None
    take: SnapshotId | None = None

    def kept(self, snapshots: Iterable[SnapshotId | None]) -> SnapshotId | None:
        """Return the snapshot that is the next to become safe; None if it is not there yet."""
        take = self.take
        if take is None:
            return None
        return min((snapshot for snapshot in snapshots if snapshot is not None and snapshot >= take), default=None)


_UNPROTECTED = Protection()


def slot_to_write(
    snapshots: Sequence[SnapshotId | None], busy: Collection[int] = (), protection: Protection = _UNPROTECTED
) -> int | None:
    """Return the slot for the next snapshot: an empty one, else that with the oldest snapshot; None if all are needed.

    Args:
        snapshots: The committed snapshot of each slot, all on one line; None for a slot without one.
        busy: Slots that are being written to disk. With one of three the newest snapshot is still not overwritten. With
            one of two it is: a worker that is killed while it copies then leaves the one that is being written.
        protection: Of snapshots that become safe. It leaves one slot of three for the newest snapshots, and none of
            two while a copy is on its way.
    """
    kept = {snapshot for snapshot in (protection.safe, protection.kept(snapshots)) if snapshot is not None}
    free = [slot for slot in range(len(snapshots)) if slot not in busy and snapshots[slot] not in kept]
    return min(free, key=lambda slot: snapshots[slot] or _NOTHING, default=None)


def write(value: Origin | Inventory) -> str:
    """Return an origin or inventory as text."""
    return msgspec.json.encode(value).decode()


def read_origin(text: str) -> Origin:
    """Return an origin from its text; one without a snapshot if it is empty or cannot be read."""
    # Of a later version of this package: then nothing in memory is known to be on the line.
    return _read(text, Origin) or Origin()


def read_inventories(inventories: Iterable[str]) -> list[Inventory]:
    """Return the inventories of the agents that hold something; one that cannot be read counts as nothing."""
    return [inventory for text in inventories if (inventory := _read(text, Inventory)) is not None]


def _read(text: str, kind: type[_T]) -> _T | None:
    try:
        return typed_json.decode(text, kind)
    except typed_json.JSONError:
        return None


def _ranges(numbers: Iterable[int]) -> tuple[tuple[int, int], ...]:
    ranges: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1] = ranges[-1][0], number
        else:
            ranges.append((number, number))
    return tuple(ranges)


def _sources(snapshot: SnapshotId, inventories: Iterable[Inventory]) -> tuple[Source, ...]:
    return tuple(
        Source(inventory.holder, part.ranges)
        for inventory in inventories
        for part in inventory.parts
        if part.id == snapshot
    )


def _numbers(ranges: Iterable[tuple[int, int]], parts: int) -> Iterator[int]:
    for first, last in ranges:
        yield from range(max(first, 0), min(last, parts - 1) + 1)


def _missing(parts: int, sources: Iterable[Source]) -> tuple[tuple[int, int], ...]:
    return _ranges(set(range(parts)).difference(*(_numbers(source.ranges, parts) for source in sources)))


def _safe(origin: Origin, inventories: Sequence[Inventory]) -> SnapshotId | None:
    """Return the newest snapshot, up to the origin of a round, that two nodes hold, and each of its parts."""
    if origin.copy is None:
        return None
    nodes: dict[SnapshotId, dict[Copy, set[str]]] = {}
    for inventory in inventories:
        for copy in inventory.copies:
            if copy.id <= origin.copy.id and origin.has(copy.id):
                nodes.setdefault(copy.id, {}).setdefault(copy, set()).add(inventory.node)
    for snapshot in sorted(nodes, reverse=True):
        (copy, holders), *differing = nodes[snapshot].items()
        if not differing and len(holders) > 1 and _are_twice(copy, inventories):
            return snapshot
    return None


def _are_twice(copy: Copy, inventories: Iterable[Inventory]) -> bool:
    """Return True if two nodes hold each part of a snapshot."""
    held = {
        (part, inventory.node)
        for inventory in inventories
        for source in _sources(copy.id, [inventory])
        for part in _numbers(source.ranges, copy.parts)
    }
    nodes = Counter(part for part, _ in held)
    return all(nodes[part] > 1 for part in range(copy.parts))


def _uncovered(copy: Copy, missing: Iterable[tuple[int, int]], replicated: bool) -> str:
    numbers = ", ".join(str(first) if first == last else f"{first} to {last}" for first, last in missing)
    return (
        f"no agent that is left holds part {numbers} of the {copy.parts} parts of step {copy.id.step} of round"
        f" {copy.id.round}: the state of a rank's own, and shards, are lost with "
        + ("their node and that of its copies" if replicated else "their node without --snapshot-replicas 1")
    )


def _differs(snapshot: SnapshotId, by_copy: dict[Copy, list[Inventory]]) -> str:
    first, second, *_ = (inventories[0].node for inventories in by_copy.values())
    return f"step {snapshot.step} of round {snapshot.round} is not the same on {first} and {second}"
