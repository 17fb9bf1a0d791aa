"""Slots, files in memory (memfd_create(2)) with a snapshot or a part of one each, and the memory that is left for them.

Agents make them, the process that writes one grows it. They are sealed against shrinking: what a process has mapped
stays there, whatever another one does (fcntl(2), F_SEAL_SHRINK). The worker of local rank 0 writes those for the state
that all ranks have, each worker those for its own part, which begins with the shards of its rank::

    header: one page of 8-byte fields | tensors | description, as JSON
"""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from slurm_elastic.snapshot import lineage
from slurm_elastic.snapshot.lineage import Copy, Protection, SnapshotId
from slurm_elastic.text import size_text

_PAGE = 4096

# The header.
#
# The agent reads it when the worker that wrote it has ended; while workers run, only to write the slot to disk, and
# then once more afterwards. A worker that is killed has carried out its stores in the order of the program up to some
# instruction, and they are visible before the end of the process is reported. So a commit field that is set proves
# that everything written before it is there.
HEADER = 4096
"""Bytes before the tensors."""
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
    """The contents of a slot with a committed snapshot; sizes in bytes.

    The description follows the tensors; those of a part begin with its shards.
    """

    copy: Copy
    tensors: int
    description: int
    shards: int = 0

    @property
    def size(self) -> int:
        """Bytes of the slot that are in use."""
        return HEADER + self.tensors + self.description

    @property
    def is_possible(self) -> bool:
        """False if another process has made the sizes up."""
        return 0 <= self.shards <= self.tensors and self.description >= 0


def clear_slot(fields: Fields) -> None:
    """Mark the slot as one without a committed snapshot."""
    fields[_COMMITTED] = 0


def fill_slot(fields: Fields, written: Contents, copy: Callable[[], object]) -> None:
    """Write a snapshot; `copy` writes tensors and description. If it raises, the slot holds nothing."""
    clear_slot(fields)
    copy()
    fields[_MAGIC] = _MAGIC_VALUE
    fields[_ROUND], fields[_STEP] = written.copy.id.round, written.copy.id.step
    fields[_TENSORS], fields[_DESCRIPTION] = written.tensors, written.description
    fields[_PART] = -1 if written.copy.part is None else written.copy.part
    fields[_PARTS], fields[_SHARDS] = written.copy.parts, written.shards
    fields[_DIGEST] = int.from_bytes(bytes.fromhex(written.copy.digest), "little", signed=True)
    fields[_COMMITTED] = 1


def is_committed(fields: Fields) -> bool:
    """Return True if the slot holds a committed snapshot of this version of the layout."""
    return fields[_MAGIC] == _MAGIC_VALUE and fields[_COMMITTED] == 1


def contents_of(fields: Fields, size: int) -> Contents | None:
    """Return what a slot of `size` bytes holds; None if no committed snapshot of this version.

    A worker can write anything, so the header is not believed beyond the bytes.
    """
    if not is_committed(fields):
        return None
    digest = fields[_DIGEST].to_bytes(8, "little", signed=True).hex()
    part = None if fields[_PART] == -1 else fields[_PART]
    copy = Copy(SnapshotId(fields[_ROUND], fields[_STEP]), digest, fields[_PARTS], part)
    content = Contents(copy, fields[_TENSORS], fields[_DESCRIPTION], fields[_SHARDS])
    fits = content.is_possible and content.size <= size
    names_part = 0 <= copy.parts <= _MOST_PARTS and (part is None or 0 <= part < copy.parts)
    return content if fits and names_part else None


class OutOfMemoryError(MemoryError):
    """The memory of this node or job does not suffice for snapshots."""


class Slot:
    """The memory of one snapshot.

    Args:
        descriptor: Of the file; closed by `close`, or with the last reference to this object.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._close = weakref.finalize(self, os.close, descriptor)
        self._map: mmap.mmap | None = None
        self._fields: memoryview | None = None

    @classmethod
    def make(cls) -> Slot:
        """Make the memory of a slot, with a header that says it holds nothing; raises OSError."""
        descriptor = os.memfd_create("slurm-elastic-snapshot", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, HEADER)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
        except OSError:
            os.close(descriptor)
            raise
        return cls(descriptor)

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return os.fstat(self.descriptor).st_size

    @property
    def allocated(self) -> int:
        """Bytes of the file that have pages."""
        return 512 * os.fstat(self.descriptor).st_blocks

    def memory(self, least: int | None = None) -> memoryview:
        """Return the whole memory, mapped anew if it has grown. Processes that are forked do not inherit it.

        Where `least` bytes are mapped, that mapping is enough, and no system call says whether it has grown.
        """
        if self._map is not None and least is not None and least <= len(self._map):
            return memoryview(self._map)
        size, mapping = self.size, self._map
        if mapping is None or len(mapping) != size:
            # Views into the old mapping keep that one. Another thread that sees the new one sees its fields.
            mapping = mmap.mmap(self.descriptor, size)
            mapping.madvise(mmap.MADV_DONTFORK)
            self._fields = memoryview(mapping)[:HEADER].cast("q")
            self._map = mapping
        return memoryview(mapping)

    @property
    def mapped(self) -> int:
        """Bytes of the present mapping, which the file has at least: it cannot shrink."""
        return 0 if self._map is None else len(self._map)

    def header(self) -> memoryview:
        """Return the fields of the header. They are the same memory in every mapping, so no system call is needed."""
        if self._fields is None:
            self.memory()
            assert self._fields is not None
        return self._fields

    @property
    def snapshot(self) -> SnapshotId | None:
        """The snapshot that the slot holds; None if no committed one."""
        fields = self.header()
        return SnapshotId(fields[_ROUND], fields[_STEP]) if is_committed(fields) else None

    def contents(self) -> Contents | None:
        """Return what the slot holds; None if no committed snapshot."""
        # It may hold more than was mapped.
        return contents_of(self.header(), self.mapped) or contents_of(self.header(), len(self.memory()))

    def clear(self) -> None:
        """Drop what the slot holds."""
        clear_slot(self.header())

    @property
    def busy(self) -> bool:
        """True while a process reads the slot: workers are asked to overwrite another one.

        A worker may not see it in time, so a process that reads a slot beside workers compares its contents afterwards.
        """
        return self.header()[_BUSY] == 1

    @busy.setter
    def busy(self, busy: bool) -> None:
        self.header()[_BUSY] = int(busy)

    @property
    def protection(self) -> Protection:
        """The snapshots that workers do not overwrite; said in the first of the slots that one writes in turn."""
        fields = self.header()
        if fields[_PROTECTS] != 1:
            return _UNPROTECTED
        take = SnapshotId(fields[_TAKE_ROUND], fields[_TAKE_STEP])
        safe = SnapshotId(fields[_SAFE_ROUND], fields[_SAFE_STEP])
        return Protection(None if safe.round < 0 else safe, None if take.round < 0 else take)

    @protection.setter
    def protection(self, protection: Protection) -> None:
        fields, safe, take = self.header(), protection.safe, protection.take
        # What is safe is said first: a worker that sees the step to take next knows what became safe before.
        fields[_SAFE_STEP], fields[_SAFE_ROUND] = (0, -1) if safe is None else (safe.step, safe.round)
        fields[_TAKE_STEP], fields[_TAKE_ROUND] = (0, -1) if take is None else (take.step, take.round)
        fields[_PROTECTS] = int(protection != _UNPROTECTED)

    def grow(self, size: int) -> None:
        """Make the file at least so large; its pages are there afterwards.

        Raises OSError where there is no memory: without this a write would end the process with SIGBUS.
        """
        size = -(-size // _PAGE) * _PAGE
        if size > self.size:
            os.posix_fallocate(self.descriptor, 0, size)

    def put(self, offset: int, content: memoryview) -> None:
        """Write bytes without a mapping, and make their pages: through a mapping each page is cleared before.

        Raises OutOfMemoryError.
        """
        try:
            while len(content):
                written = os.pwrite(self.descriptor, content, offset)
                content, offset = content[written:], offset + written
        except OSError as error:
            raise OutOfMemoryError(_lacking(size_text(len(content)), len(content), free_memory(), error)) from None

    def fill(self, contents: Contents, write: Callable[[], object]) -> None:
        """Write a snapshot; `write` writes all of it behind the header. If it raises, the slot holds nothing."""
        fill_slot(self.header(), contents, write)

    def close(self) -> None:
        """Close the file; the mapping goes with the last view into it."""
        self._close()
        self._map = self._fields = None


@dataclass(frozen=True, slots=True)
class Reserve:
    """The memory that a node needs for snapshots, as it is at the first one; sizes in bytes.

    Attributes:
        whole: Of the state that all ranks have.
        part: Of what one rank alone has; 0 for nothing.
        replicates: True if the node holds copies of the parts of another one.
        own: Of a rank's own state in `part`.
        slots: Number of snapshots that the node holds.
    """

    whole: int
    part: int = 0
    workers: int = 1
    replicates: bool = False
    nodes: int = 1
    own: int = 0
    slots: int = lineage.SLOTS

    def require(self, reserved: int, free: int) -> None:
        """Raise OutOfMemoryError unless the bytes are there: those held for snapshots already, and those still free."""
        needs = [(self.slots, 1, self.whole, "of the state that all ranks have")]
        if self.part:
            needs.append((self.slots, self.workers, self.part, "of what each rank alone has"))
            if self.replicates:
                needs.append((lineage.REPLICA_SLOTS, self.workers, self.part, "of copies from another node"))
            others = (self.nodes - 1) * self.workers
            if others and self.part > self.own:
                needs.append((1, self._borrowed(others), self.part, "of shards that workers start from"))
            if others and self.own:
                needs.append((1, others, self.own, "of the other ranks' own state, which workers start from"))
        total = sum(count * workers * size for count, workers, size, _ in needs)
        missing = total - reserved
        if missing <= free:
            return
        parts = " + ".join(
            f"{count} x {f'{workers} x ' if workers > 1 else ''}{size_text(size)}{f' {of}' if self.part else ''}"
            for count, workers, size, of in needs
        )
        raise OutOfMemoryError(_lacking(f"{parts} = {size_text(total)}", missing, free, count=self.slots))

    def with_nodes(self, nodes: int) -> Reserve:
        """Return the memory that a node needs if so many nodes, fewer than now, share the same state."""
        part = self.own + -(-(self.part - self.own) * self.nodes // nodes)
        return replace(self, part=part, nodes=nodes, replicates=self.replicates and nodes > 1)

    def _borrowed(self, others: int) -> int:
        """Return the number of parts with shards that the node may need from others when a node was lost.

        The others then have the shards of one node more among them. What lies between the elements of a piece comes
        with them, so the node may need one more than that.
        """
        return min(others, -(-self.workers * self.nodes // (self.nodes - 1)) + 1)


def _lacking(needs: str, missing: int, free: int, error: OSError | None = None, count: int = 1) -> str:
    """Return in one line what is missing; `count` is the number of snapshots that the slots are for."""
    fewer = " hold two snapshots by --snapshot-slots 2 of the agent," if count > 2 else ""
    return (
        f"snapshots need {needs} of memory on this node,"
        f" {size_text(missing)} more than they have, and {size_text(free)} are free; ask for more by --mem,{fewer}"
        f" or do not call snapshot.save{f' ({error.strerror})' if error is not None else ''}"
    )


def check_memory(missing: int, needs: str = "", count: int = 1) -> None:
    """Raise OutOfMemoryError unless the `missing` bytes can still be had, of what `count` slots need."""
    if missing > (free := free_memory()):
        raise OutOfMemoryError(_lacking(needs or size_text(missing), missing, free, count=count))


def require_memory(size: int, slots_of_node: Sequence[Slot]) -> None:
    """Make room in all slots for snapshots of this size, in bytes; raises OutOfMemoryError."""
    missing = sum(max(0, size - slot.size) for slot in slots_of_node)
    if not missing:
        return
    count = len(slots_of_node)
    needs = f"{count} x {size_text(size)} = {size_text(count * size)}"
    check_memory(missing, needs, count)
    try:
        for slot in slots_of_node:
            slot.grow(size)
    except OSError as error:
        raise OutOfMemoryError(_lacking(needs, missing, free_memory(), error, count)) from None


def free_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes that this process can still use: of the machine, and of its control groups (cgroups(7))."""
    free = []
    for line in (proc / "meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            free.append(1024 * int(line.split()[1]))
    for line in (proc / "self" / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            free += _left(cgroups, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            free += _left(cgroups / "memory", path, *names)
    return min(free, default=0)


def _left(root: Path, path: str, limit: str, usage: str, reclaimable: str) -> list[int]:
    """Return the bytes left in a control group and in each one above it, where they are limited."""
    limits = []
    group = root / path.lstrip("/")
    while group != root.parent:
        try:
            most = (group / limit).read_text().strip()
            used = int((group / usage).read_text())
            statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            most = "max"
        if most != "max":
            # The kernel drops cached files before it refuses memory.
            limits.append(max(0, int(most) - used + int(statistics.get(reclaimable, 0))))
        group = group.parent
    return limits


def copies_in(slots: Sequence[Slot]) -> list[Copy | None]:
    """Return the snapshot of each slot; None for one that holds none."""
    return [None if (contents := slot.contents()) is None else contents.copy for slot in slots]
