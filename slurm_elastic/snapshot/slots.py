"""The header of a slot: the snapshot, or part of one, that its memory holds, and whether that is complete.

A slot is a file in memory (memfd_create(2)) of the agent. The worker of local rank 0 writes those for the state that
all ranks have, each worker those for its own part, and all workers of the node read them in a later round::

    header: one page of 8-byte fields | tensors | description, as JSON

The tensors of a part begin with the rank's shards of sharded tensors.

The agent reads a header when the worker that wrote it has ended; while workers run, only to write the slot to disk, and
then once more afterwards. A worker that is killed has carried out its
stores in the order of the program up to some instruction, and they are visible before the end of the process is
reported. So a commit field that is set proves that everything written before it is there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from slurm_elastic.snapshot.lineage import Copy, Protection, SnapshotId

HEADER = 4096
"""Bytes before the tensors."""
ALIGNMENT = 64
"""Each tensor begins at a multiple of this."""

FIELDS = 16
"""Number of fields in use."""
_MAGIC, _COMMITTED, _ROUND, _STEP, _TENSORS, _DESCRIPTION, _DIGEST, _BUSY, _PART, _PARTS, _SHARDS = range(11)
_SAFE_STEP, _SAFE_ROUND, _TAKE_STEP, _TAKE_ROUND, _PROTECTS = range(11, FIELDS)
_MAGIC_VALUE = int.from_bytes(b"slurm_s2", "little", signed=True)
"""The last character is the version of the layout."""
_MOST_PARTS = 1 << 20
_UNPROTECTED = Protection()


class Fields(Protocol):
    """The fields of a header: of shared memory, or in a simulation."""

    def __getitem__(self, index: int, /) -> int: ...

    def __setitem__(self, index: int, value: int, /) -> None: ...


@dataclass(frozen=True, slots=True)
class Contents:
    """The contents of a slot with a committed snapshot.

    Attributes:
        copy: The snapshot.
        tensors: Bytes of all tensors, which follow the header.
        description: Bytes of the description, which follows the tensors.
        shards: Bytes of the shards, with which the tensors of a part begin.
    """

    copy: Copy
    tensors: int
    description: int
    shards: int = 0

    @property
    def size(self) -> int:
        """Bytes of the slot that are in use."""
        return HEADER + self.tensors + self.description


def clear(fields: Fields) -> None:
    """Mark the slot as one without a committed snapshot."""
    fields[_COMMITTED] = 0


def fill(fields: Fields, written: Contents, copy: Callable[[], object]) -> None:
    """Write a snapshot.

    Args:
        fields: The header.
        written: What the slot will hold.
        copy: Writes tensors and description. If it raises, the slot holds nothing.
    """
    clear(fields)
    copy()
    fields[_MAGIC] = _MAGIC_VALUE
    fields[_ROUND], fields[_STEP] = written.copy.id.round, written.copy.id.step
    fields[_TENSORS], fields[_DESCRIPTION] = written.tensors, written.description
    fields[_PART] = -1 if written.copy.part is None else written.copy.part
    fields[_PARTS], fields[_SHARDS] = written.copy.parts, written.shards
    fields[_DIGEST] = int.from_bytes(bytes.fromhex(written.copy.digest), "little", signed=True)
    fields[_COMMITTED] = 1


def contents(fields: Fields, size: int) -> Contents | None:
    """Return what the slot holds; None if no committed snapshot of this version.

    Args:
        fields: The header.
        size: Bytes of the slot. A worker can write anything, so the header is not believed beyond them.
    """
    if fields[_MAGIC] != _MAGIC_VALUE or fields[_COMMITTED] != 1:
        return None
    digest = fields[_DIGEST].to_bytes(8, "little", signed=True).hex()
    part = None if fields[_PART] == -1 else fields[_PART]
    copy = Copy(SnapshotId(fields[_ROUND], fields[_STEP]), digest, fields[_PARTS], part)
    content = Contents(copy, fields[_TENSORS], fields[_DESCRIPTION], fields[_SHARDS])
    if (
        content.tensors < 0
        or content.description < 0
        or content.size > size
        or not 0 <= content.shards <= content.tensors
    ):
        return None
    if not 0 <= copy.parts <= _MOST_PARTS or not (part is None or 0 <= part < copy.parts):
        return None
    return content


def set_busy(fields: Fields, busy: bool) -> None:
    """Ask workers to overwrite another slot, or take that back.

    A worker may not see it in time, so a process that reads a slot beside workers compares its contents afterwards.
    """
    fields[_BUSY] = int(busy)


def is_busy(fields: Fields) -> bool:
    """Return True if a process reads the slot that would have to begin again if it was overwritten."""
    return fields[_BUSY] == 1


def set_protection(fields: Fields, protection: Protection) -> None:
    """Say which snapshots workers do not overwrite, in the first slot of those that a worker writes in turn.

    What is safe is said first: a worker that sees the step to take next knows what became safe before.
    """
    safe, take = protection.safe, protection.take
    fields[_SAFE_STEP], fields[_SAFE_ROUND] = (0, -1) if safe is None else (safe.step, safe.round)
    fields[_TAKE_STEP], fields[_TAKE_ROUND] = (0, -1) if take is None else (take.step, take.round)
    fields[_PROTECTS] = int(protection != _UNPROTECTED)


def protection(fields: Fields) -> Protection:
    """Return which snapshots are not overwritten."""
    if fields[_PROTECTS] != 1:
        return _UNPROTECTED
    take = SnapshotId(fields[_TAKE_ROUND], fields[_TAKE_STEP])
    safe = SnapshotId(fields[_SAFE_ROUND], fields[_SAFE_STEP])
    return Protection(None if safe.round < 0 else safe, None if take.round < 0 else take)


def round_up(offset: int) -> int:
    """Return the next offset at which a tensor may begin."""
    return -(-offset // ALIGNMENT) * ALIGNMENT
