"""The worker's side: copies its state into the memory of the agent, and starts from what is there."""

from __future__ import annotations

import hashlib
import logging
import operator
import os
import sys
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from slurm_elastic.snapshot._rank_values import RankValues
from slurm_elastic.snapshot._slot_writer import SlotWriter, slot_size
from slurm_elastic.snapshot.disk.worker_side import DiskSide
from slurm_elastic.snapshot.hand_over import VARIABLE, Answer, Directory, Request, ask
from slurm_elastic.snapshot.lineage import SLOTS, Copy, Holder, SnapshotId
from slurm_elastic.snapshot.memory import OutOfMemoryError, Reserve, Slot, free_memory
from slurm_elastic.snapshot.sharding import Layout, Planner
from slurm_elastic.snapshot.state import (
    PER_RANK,
    Describer,
    Flat,
    StateError,
    Table,
    flatten,
    is_stateful,
    read_slot,
    state_of,
    table_of,
)

if TYPE_CHECKING:
    import torch

from slurm_elastic.snapshot._parts import (
    Part,
    PartsOfOrigin,
    global_rank,
    own_state,
    restored_state,
    snapshot_missing,
)

logger = logging.getLogger("slurm_elastic")


class WorkerMemory:
    """The slots of the agent, as a worker uses them; those of this process if it has no agent, and so no `path`.

    `writes` is true if this worker writes snapshots for its node. Without an agent, `part_slots` are for the part of
    this process; None if nothing reads them.
    """

    def __init__(
        self,
        slots: list[Slot],
        answered: Answer,
        round_: int,
        *,
        writes: bool,
        path: str | None = None,
        part_slots: list[Slot] | None = None,
    ) -> None:
        self.slots, self.answered, self._start = slots, answered, answered.slot
        self._round, self._writes, self._path = round_, writes, path
        self._writer = SlotWriter(slots)
        self._own_writer = None if part_slots is None else SlotWriter(part_slots)
        self._describer = Describer()
        self._values = RankValues(global_rank(), int(os.environ.get("GROUP_WORLD_SIZE", "1")) if path else 1, round_)
        self._saved: int | None = None
        self._reserved = False
        self._refused = False
        self._tables: dict[str, tuple[tuple[Any, ...], Table]] = {}
        self._layout: tuple[tuple[object, ...], Planner, bytes] | None = None

    def origin(self) -> SnapshotId | None:
        """Return the snapshot that the round starts from; None if it starts from none, or if that is gone."""
        return None if self._start is None else self.slots[self._start].snapshot

    def load(self, present: Callable[[], Mapping[str, Any]], in_place: Collection[str] = ()) -> dict[str, Any] | None:
        """Return the state that the round starts from; None if from no snapshot. See `restored_state`."""
        if self._start is None:
            return None
        slot = self.slots[self._start]
        contents = slot.contents()
        if contents is not None and contents.copy.id.round != self._round:
            tree, views, layout = read_slot(slot, contents)
            parts = PartsOfOrigin(self._path, self._round, contents.copy, layout)
            restored = restored_state(tree, views, layout, parts, present, in_place)
            if parts.are_unchanged() and slot.contents() == contents:
                return restored
        # The worker that writes for this node has saved so often since the start that it needed this slot.
        raise RuntimeError("snapshot.load comes too late: call it on all ranks before the first snapshot.save")

    def save(
        self, step: int, state: Mapping[str, Any], per_rank: Mapping[str, Any] | None, *, check_finite: bool
    ) -> None:
        """Copy a state into the slot that is needed least; the second snapshot of a step is none."""
        if self._saved is not None and step < self._saved:
            raise ValueError(f"snapshot of step {step} after that of step {self._saved}: count steps over all epochs")
        flat = flatten(state)
        own = None if per_rank is None else own_state(per_rank)
        repeated, self._saved = step == self._saved, step
        has_part = bool(flat.sharded) or own is not None
        if has_part and _disk.directory is not None and not _disk.has_parts:
            raise StateError(
                "snapshot.save has sharded tensors (DTensor) or per_rank, and snapshot.load had none: pass the same"
                " state to both, so that all nodes write their parts to disk"
            )
        if has_part and self._path is None and self._own_writer is None:
            if flat.sharded and _disk.directory is not None:
                raise StateError(
                    "sharded tensors (DTensor) of several ranks get to disk only by the agents of slurm-elastic; under"
                    " torchrun write them by torch.distributed.checkpoint"
                )
            # Without an agent nothing outlives this process.
            has_part = False
        if repeated or not (self._writes or has_part):
            return
        tensors = flat.tensors if self._writes else []
        part = self._part_of(flat, own) if has_part else None
        checked = tensors if part is None else [*tensors, *part.tensors]
        if check_finite and self._is_refused(step, checked):
            return
        snapshot = SnapshotId(self._round, step)
        table = self._table_of("state", tensors)
        layout = b"null" if self._layout is None or part is None else self._layout[2]
        description = self._describer.describe(flat.tree, table, layout) if self._writes else b""
        if self._writes and not self._reserved:
            size = 0 if part is None else slot_size(self._table_of("part", part.tensors), part.description)
            own_size = 0 if part is None or own is None else size - part.shards
            self._check_memory(slot_size(table, description), size, own_size)
            self._reserved = True
        if part is not None:
            self._write_part(snapshot, part)
        if self._writes:
            digest = hashlib.blake2b(description, digest_size=8).hexdigest()
            self._writer.write(Copy(snapshot, digest, 0 if part is None else part.of), description, table, tensors)
            self._values.saved(step, flat.tree)

    def _check_memory(self, whole: int, part: int, own: int) -> None:
        """Check that the node has the memory for snapshots of this size, of all its workers and of copies."""
        answered = Answer(held=sum(slot.size for slot in self.slots))
        if self._path is not None:
            # What other workers have taken meanwhile is not free any more.
            answered, _ = ask(self._path, Request(self._round))
        workers = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        nodes = int(os.environ.get("GROUP_WORLD_SIZE", "1"))
        reserve = Reserve(whole, part, workers, answered.replicates, nodes, own, len(self.slots))
        free, fewest = free_memory(), answered.fewest_nodes
        reserve.require(answered.held, free)
        if fewest < nodes and global_rank() == 0:
            try:
                reserve.with_nodes(fewest).require(answered.held, free)
            except OutOfMemoryError as error:
                logger.warning(
                    "a round with only %d of the nodes, which --nnodes allows, would fail: %s", fewest, error
                )

    def _part_of(self, flat: Flat, own: Flat | None) -> Part:
        """Return what this rank has besides the state of all ranks."""
        world = int(os.environ.get("WORLD_SIZE", "1"))
        shards: list[torch.Tensor] = []
        key: tuple[object, ...] = ()
        if flat.sharded:
            from slurm_elastic.snapshot._sharded import key_of, layout_of, locals_of

            shards, key = locals_of(flat.sharded), key_of(flat.sharded)
        key = own is not None, key
        if self._layout is None or self._layout[0] != key:
            layout = Layout(world, own is not None, (), ())
            if flat.sharded:
                layout = layout_of(flat.sharded, global_rank(), world, own=own is not None)
            self._layout = key, Planner(layout), msgspec.json.encode(layout)
        planner = self._layout[1]
        own = own or flatten({})
        description = self._describer.describe(own.tree, self._table_of("own", own.tensors))
        return Part(
            planner.part_numbers[global_rank()],
            planner.parts,
            description,
            [*shards, *own.tensors],
            planner.shards(global_rank())[1] if shards else 0,
        )

    def _write_part(self, snapshot: SnapshotId, part: Part) -> None:
        if self._own_writer is None:
            assert self._path is not None
            local_rank = int(os.environ.get("LOCAL_RANK", "0"))
            failure = f"the agent has no memory for what rank {global_rank()} saves"
            _, slots = ask(self._path, Request(self._round, writes=local_rank), failure)
            self._own_writer = SlotWriter(slots)
        table = self._table_of("part", part.tensors)
        copy = Copy.of_part(snapshot, part.number, part.of)
        self._own_writer.write(copy, part.description, table, part.tensors, part.shards)

    def _is_refused(self, step: int, tensors: list[torch.Tensor]) -> bool:
        finite = all(bool(tensor.isfinite().all()) for tensor in tensors)
        if not finite and not self._refused:
            self._refused = True
            logger.warning("no snapshot of step %d: the state has NaN or infinity", step)
        return not finite

    def _table_of(self, what: str, tensors: list[torch.Tensor]) -> Table:
        key = tuple([(tensor.dtype, tensor.shape) for tensor in tensors])
        entry = self._tables.get(what)
        if entry is None or entry[0] != key:
            entry = self._tables[what] = key, table_of(tensors)
        return entry[1]

    def close(self) -> None:
        """Let go of the memory."""
        self._writer.close()
        if self._own_writer is not None:
            self._own_writer.close()


def save(step: int, /, *, check_finite: bool = False, per_rank: Mapping[str, Any] | None = None, **state: Any) -> None:
    """Take a snapshot of the training state; returns when it is copied.

    Call it on all ranks after the same step; with `trainer.should_stop`, before that. State that every rank has is
    held once per node: the worker of local rank 0 copies. Of sharded tensors (DTensor) each rank copies its shards.

    Args:
        step: The script's own count of steps, over all epochs. A second call with the same step does nothing.
        check_finite: True to take no snapshot of a state whose tensors have NaN or infinity; the first is logged.
        per_rank: State of this rank's own, by name: plain values. All ranks pass it, or none does.
        **state: What has to come back, by name: objects with `state_dict` and `load_state_dict`, or plain values:
            numbers, strings, bytes, tensors, and dicts, lists and tuples of them. All ranks have the same, but for
            their shards.

    Raises:
        TypeError: The step is no whole number, or the state has something that a snapshot cannot hold.
        ValueError: The step is lower than that of the call before, or does not fit into 64 bits.
        OutOfMemoryError: The memory of the node or job does not suffice; the message names what is needed.
    """
    step = operator.index(step)
    memory = _memory()
    if _disk.directory is not None and not _disk.started:
        raise RuntimeError("snapshot.save comes before snapshot.load: after snapshot.to_disk call load first")
    if memory is not None:
        memory.save(step, state_of(state), per_rank, check_finite=check_finite)


def to_disk(
    path: str | os.PathLike[str], *, every: float = 600.0, keep: int = 2, every_steps: int | None = None
) -> None:
    """Have snapshots written to disk, in the background, and have `load` start from there if memory has none.

    Call it on all ranks before `load`. Under an agent, the agent of rank 0 writes; else the process of rank 0.

    Args:
        path: Directory of the checkpoints, which all nodes see; it is made if it is missing.
        every: Seconds between checkpoints.
        keep: Number of checkpoints that stay.
        every_steps: Steps after which there is one before that time. It is of the newest step then: steps that are
            taken in half a second, or while a checkpoint is written, come on top.

    Raises:
        ValueError: `every` is negative, or `keep` or `every_steps` is less than 1.
        RuntimeError: `load` was called before.
    """
    if not every >= 0 or keep < 1:
        raise ValueError(f"every={every}, keep={keep}: checkpoints need 0 seconds or more, and one at least that stays")
    if every_steps is not None and every_steps < 1:
        raise ValueError(f"every_steps={every_steps}: a checkpoint is due after 1 step or more")
    place = os.path.abspath(os.fspath(path))  # noqa: PTH100 (pathlib takes time to import)
    if _disk.started:
        raise RuntimeError("snapshot.to_disk comes too late: call it before snapshot.load")
    _disk.directory = Directory(place, float(every), keep, every_steps=every_steps or 0)


def load(**state: Any) -> Any:
    """Give the script the state that this round starts from, or leave it as it is.

    Objects with `load_state_dict` are loaded in place. What is not asked for by name is not read. After `to_disk` a
    round without a snapshot in memory starts from the newest checkpoint on disk. Rank 0 chooses it, and the other ranks
    get its choice through the store of the round.

    Args:
        **state: As in `save`, with the same names. Sharded tensors are divided as those of the present state, at any
            number of ranks. With `per_rank`, a value for a fresh start such as an empty list, `load` returns what each
            rank of the snapshot had saved there, as a list of dicts by rank: the new group has ranks of its own, maybe
            more or fewer, and the script decides which one takes what.

    Returns:
        The plain values: the value itself if there is one, a tuple in the order of the arguments if there are more,
        None if there is none. Unchanged if there is no snapshot to start from.

    Raises:
        KeyError: The snapshot has no state of a name.
        StateError: A tensor of the snapshot is divided in a way that the present state does not show.
        RuntimeError: The snapshot or checkpoint that the round starts from cannot be had.
    """
    memory = _memory()
    modules = [name for name, value in state.items() if _is_module(value)]
    restored = memory.load(lambda: state_of(state), modules) if memory is not None else None
    is_in_memory = restored is not None
    if _disk.directory is not None:
        # A process that has sharded tensors has imported their module.
        has_sharded = "torch.distributed.tensor" in sys.modules and bool(flatten(state_of(state)).sharded)
        origin, answered = (None, Answer()) if memory is None else (memory.origin(), memory.answered)
        start = origin if is_in_memory else None
        stored = _disk.start(start, answered, _name_directory, has_parts=PER_RANK in state or has_sharded)
        if stored is not None:
            is_in_memory = False
            layout, present = stored.layout, lambda: state_of(state)
            restored = _disk.read(lambda: restored_state(stored.tree, stored.tensors, layout, stored, present, modules))
    plain = []
    for name, value in state.items():
        if restored is not None and name not in restored and not (name == PER_RANK and not is_in_memory):
            raise KeyError(
                f"the snapshot has no state {name!r}, only {', '.join(restored)}; save and load the same names"
            )
        if is_stateful(value):
            if restored is not None:
                value.load_state_dict(restored[name])
        else:
            plain.append(value if restored is None else restored.get(name, value))
    if len(plain) > 1:
        return tuple(plain)
    return plain[0] if plain else None


def _is_module(value: Any) -> bool:
    # A process that has modules has imported torch.
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)


def _name_directory(directory: Directory) -> Holder | None:
    """Have an agent write, or this process if it has none."""
    global _attached
    path = os.environ.get(VARIABLE)
    if path:
        return ask(path, Request(_round(), directory), "no checkpoint can be written")[0].collector
    if global_rank() == 0:
        # Without an agent this process holds what it writes.
        slots = [Slot.make() for _ in range(SLOTS)]
        alone = os.environ.get("WORLD_SIZE", "1") == "1"
        parts = [Slot.make() for _ in range(SLOTS)] if directory.has_parts and alone else None
        _attached = WorkerMemory(slots, Answer(), _round(), writes=True, part_slots=parts)
        _disk.write(directory, slots, parts or [], _round())
    return None


_attached: WorkerMemory | None = None
_asked = False
_disk = DiskSide()


def _memory() -> WorkerMemory | None:
    """Return the memory of the agent; None without one."""
    global _attached, _asked
    if not _asked:
        _asked = True
        path = os.environ.get(VARIABLE)
        if path:
            answered, slots = ask(path, Request(_round()), snapshot_missing(_round()))
            writes = os.environ.get("LOCAL_RANK", "0") == "0"
            _attached = WorkerMemory(slots, answered, _round(), writes=writes, path=path)
    return _attached


def _round() -> int:
    return int(os.environ.get("SLURM_ELASTIC_ROUND", "0"))


def _forget() -> None:
    """Let go of the memory in a forked process, such as one of a data loader: it is no worker."""
    global _attached, _asked, _disk
    if _attached is not None:
        _attached.close()
    _attached, _asked, _disk = None, False, DiskSide()


os.register_at_fork(after_in_child=_forget)
