"""Decides which snapshot the next round starts from. Pure.

Each agent sends its inventory when it joins: the snapshots that its memory holds. Its workers have ended then, so the
inventory is final. The leader calls :func:`choose` with the inventories of all agents that wait for a place, spares
included, and writes the result, the origin, into the record of the round. Membership takes both as text.

A snapshot is named by the round in which it was taken and the step. Two rules keep off-lineage state out:

- A round starts from its origin, so every snapshot taken in it descends from that origin. The group of a round that was
  cut off goes on with snapshots of its own; its round is not the last one any more then.
- The line of an origin has, for each round before, the last step that counts: the state of the run went from there to
  the next round. A snapshot of an earlier round is on the line if its step is not later.

State that all ranks have needs one committed copy. Copies of one snapshot whose digests differ are of ranks whose
plain values differ; no such snapshot is chosen.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import msgspec

__all__ = [
    "SLOTS",
    "Copy",
    "Holder",
    "Inventory",
    "Origin",
    "Preparation",
    "SnapshotId",
    "choose",
    "prepare",
    "read_origin",
    "slot_to_write",
    "write",
]

SLOTS = 3
"""Snapshots that an agent holds: the newest two stay committed while a worker writes the third."""

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
    """A committed snapshot in the memory of an agent.

    Attributes:
        id: Of the snapshot.
        digest: Of its layout and plain values.
    """

    id: SnapshotId
    digest: str


@dataclass(frozen=True, slots=True)
class Holder:
    """The address and port at which an agent sends its snapshots to other agents of the run."""

    address: str
    port: int


@dataclass(frozen=True, slots=True)
class Inventory:
    """The snapshots that an agent holds, and where other agents get them."""

    copies: tuple[Copy, ...]
    holder: Holder
    node: str = ""


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
    """

    copy: Copy | None = None
    holders: tuple[Holder, ...] = ()
    line: tuple[SnapshotId, ...] = ()
    note: str = ""
    below: int | None = None

    def has(self, snapshot: SnapshotId) -> bool:
        """Return True if the snapshot is on the line."""
        return any(snapshot.round == last.round and snapshot.step <= last.step for last in self.line)


@dataclass(frozen=True, slots=True)
class Preparation:
    """The work of an agent on its slots before the workers of a round start.

    Attributes:
        clear: Slots whose snapshots do not belong to the line of the round.
        slot: The slot that the workers start from; None if the round starts from no snapshot.
        fetch: True if another agent has to send the snapshot for that slot first.
    """

    clear: tuple[int, ...]
    slot: int | None = None
    fetch: bool = False


def choose(last_round: int | None, before: str, inventories: Sequence[str], failed: bool = False) -> str:
    """Return the origin of the next round.

    Args:
        last_round: Number of the last round of this incarnation; None before the first.
        before: The origin of that round, as its record has it.
        inventories: What the agents that wait for a place hold; empty for an agent that holds nothing. An inventory
            that cannot be read counts as empty.
        failed: True if the last round ended because a worker failed. If it took no snapshot, the state that it started
            from may be why: then the next round starts from an older snapshot.

    Returns:
        The origin; empty if the round starts from no snapshot and there is nothing to say about that.
    """
    line = read_origin(before)
    if last_round is None or (line.copy is None and not any(inventories)):
        return ""
    copies: dict[SnapshotId, dict[str, list[Inventory]]] = {}
    for inventory in read_inventories(inventories):
        for copy in inventory.copies:
            # An agent that was away may hold the origin with other plain values than those that the round started from.
            same = line.copy is None or copy.id != line.copy.id or copy == line.copy
            if same and (copy.id.round == last_round or line.has(copy.id)):
                copies.setdefault(copy.id, {}).setdefault(copy.digest, []).append(inventory)
    note = ""
    again = failed and line.copy is not None and all(snapshot.round != last_round for snapshot in copies)
    for snapshot in sorted(copies, reverse=True):
        if again and line.copy is not None and snapshot >= line.copy.id:
            started = f"step {snapshot.step} of round {snapshot.round}"
            note = f"workers that started from {started} failed before the next snapshot"
            continue
        by_digest = copies[snapshot]
        if len(by_digest) > 1:
            note = note or _differs(snapshot, by_digest)
            continue
        ((digest, found),) = by_digest.items()
        kept = tuple(last for last in line.line if last.round < snapshot.round)
        return write(
            Origin(
                Copy(snapshot, digest),
                tuple(inventory.holder for inventory in found[:_HOLDERS]),
                (*kept, snapshot)[-_LINE:],
                note,
            )
        )
    if line.copy is not None:
        note = (
            note
            or f"no agent that is left holds a snapshot since step {line.copy.id.step} of round {line.copy.id.round}"
        )
    below = line.copy.id.step if again and line.copy is not None else None
    return write(Origin(note=f"{note}; it starts from disk", below=below)) if note else ""


def prepare(held: Sequence[Copy | None], origin: Origin) -> Preparation:
    """Return what an agent does with its slots before the workers of a round start.

    Args:
        held: The committed snapshot of each slot; None for a slot without one.
        origin: Of the round.
    """

    def stays(copy: Copy | None) -> bool:
        # A snapshot whose plain values differ from those of the origin is not the one that the round starts from.
        same = copy is not None and (origin.copy is None or copy.id != origin.copy.id or copy == origin.copy)
        return copy is not None and same and origin.has(copy.id)

    kept = [copy.id if copy is not None and stays(copy) else None for copy in held]
    clear = tuple(slot for slot, copy in enumerate(held) if copy is not None and kept[slot] is None)
    if origin.copy is None:
        return Preparation(clear)
    if origin.copy.id in kept:
        return Preparation(clear, kept.index(origin.copy.id))
    return Preparation(clear, slot_to_write(kept), fetch=True)


def slot_to_write(held: Sequence[SnapshotId | None], busy: Collection[int] = ()) -> int:
    """Return the slot for the next snapshot: one without a committed snapshot, else the one with the oldest.

    Args:
        held: The committed snapshot of each slot, all on one line; None for a slot without one.
        busy: Slots that are being written to disk. With one of three the newest snapshot is still not overwritten.
    """
    return min((slot for slot in range(len(held)) if slot not in busy), key=lambda slot: held[slot] or _NOTHING)


def write(value: Origin | Inventory) -> str:
    """Return an origin or inventory as text."""
    return msgspec.json.encode(value).decode()


def read_origin(text: str) -> Origin:
    """Return an origin from its text; one without a snapshot if it is empty or cannot be read."""
    if not text:
        return Origin()
    try:
        return msgspec.json.decode(text, type=Origin)
    except msgspec.MsgspecError:
        # Of a later version of this package: then nothing in memory is known to be on the line.
        return Origin()


def read_inventories(inventories: Iterable[str]) -> list[Inventory]:
    """Return the inventories of the agents that hold something; one that cannot be read counts as nothing."""
    found = []
    for text in inventories:
        if text:
            try:
                found.append(msgspec.json.decode(text, type=Inventory))
            except msgspec.MsgspecError:
                continue
    return found


def _differs(snapshot: SnapshotId, by_digest: dict[str, list[Inventory]]) -> str:
    first, second, *_ = (found[0].node for found in by_digest.values())
    return f"step {snapshot.step} of round {snapshot.round} is not the same on {first} and {second}"
