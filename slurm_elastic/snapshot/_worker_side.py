"""The worker's side: copies its state into the memory of the agent, and starts from what is there."""

from __future__ import annotations

import hashlib
import logging
import operator
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from slurm_elastic.snapshot._disk_side import DiskSide
from slurm_elastic.snapshot.hand_over import VARIABLE, HandOverError, Request, ask, name_directory
from slurm_elastic.snapshot.lineage import SLOTS, Copy, SnapshotId, slot_to_write
from slurm_elastic.snapshot.memory import Slot, require_memory
from slurm_elastic.snapshot.slots import HEADER
from slurm_elastic.snapshot.state import Table, TensorPlace, describe, flatten, table_of, unflatten

if TYPE_CHECKING:
    import torch

__all__ = ["load", "save", "to_disk"]

logger = logging.getLogger("slurm_elastic")


class WorkerMemory:
    """The slots of the agent, as a worker uses them.

    Args:
        slots: Of the agent, or of this process if it has none.
        start: Index of the slot that this worker starts from; None for none.
        round_: The round of this worker.
        writes: True if this worker writes snapshots for its node.
        below: Only checkpoints of earlier steps are used, if the round starts from disk; None for all.
    """

    def __init__(
        self, slots: list[Slot], start: int | None, round_: int, *, writes: bool, below: int | None = None
    ) -> None:
        self.slots, self._start, self._round, self._writes = slots, start, round_, writes
        self.below = below
        self._saved: int | None = None
        self._refused = False
        self._table: tuple[tuple[Any, ...], Table] | None = None
        self._views: dict[int, tuple[int, Table, list[torch.Tensor | None]]] = {}

    def origin(self) -> SnapshotId | None:
        """Return the snapshot that the round starts from; None if it starts from none, or if that is gone."""
        contents = self.slots[self._start].contents() if self._start is not None else None
        return None if contents is None else contents.copy.id

    def load(self) -> dict[str, Any] | None:
        """Return the state of the snapshot that the round starts from; None if it starts from none."""
        if self._start is None:
            return None
        slot = self.slots[self._start]
        contents = slot.contents()
        found = None
        if contents is not None and contents.copy.id.round != self._round:
            body = slot.memory()[HEADER : contents.size]
            found = unflatten(bytes(body[contents.tensors :]), body[: contents.tensors])
        if found is None or slot.contents() != contents:
            # The worker that writes for this node has saved so often since the start that it needed this slot.
            raise RuntimeError("snapshot.load comes too late: call it on all ranks before the first snapshot.save")
        return found

    def save(self, step: int, state: Mapping[str, Any], *, check_finite: bool) -> None:
        """Copy a state into the slot that is needed least; the second snapshot of a step is none."""
        if self._saved is not None and step < self._saved:
            raise ValueError(f"snapshot of step {step} after that of step {self._saved}: count steps over all epochs")
        tree, tensors = flatten(state)
        repeated, self._saved = step == self._saved, step
        if repeated or not self._writes or (check_finite and self._is_refused(step, tensors)):
            return
        table = self._table_of(tensors)
        description = describe(tree, table)
        # Plain values change their length.
        require_memory(HEADER + table.size + 2 * len(description), self.slots)
        held = [slot.contents() for slot in self.slots]
        busy = [index for index, slot in enumerate(self.slots) if slot.busy]
        index = slot_to_write([None if each is None else each.copy.id for each in held], busy)
        digest = hashlib.blake2b(description, digest_size=8).hexdigest()
        self.slots[index].fill(
            Copy(SnapshotId(self._round, step), digest),
            table.size,
            description,
            lambda body: self._copy(index, table, tensors),
        )

    def _is_refused(self, step: int, tensors: list[torch.Tensor]) -> bool:
        finite = all(bool(tensor.isfinite().all()) for tensor in tensors)
        if not finite and not self._refused:
            self._refused = True
            logger.warning("no snapshot of step %d: the state has NaN or infinity", step)
        return not finite

    def _table_of(self, tensors: list[torch.Tensor]) -> Table:
        key = tuple((tensor.dtype, tensor.shape) for tensor in tensors)
        if self._table is None or self._table[0] != key:
            self._table = key, table_of(tensors)
        return self._table[1]

    def _copy(self, index: int, table: Table, tensors: list[torch.Tensor]) -> None:
        if not tensors:
            return
        import torch

        slot = self.slots[index]
        memory = slot.memory()
        generation, of, views = self._views.get(index, (0, None, []))
        if generation != slot.generation or of is not table:
            views = [_view(memory, place) for place in table.places]
            self._views[index] = slot.generation, table, views
        with torch.no_grad():
            for view, tensor in zip(views, tensors, strict=True):
                if view is not None:
                    view.copy_(tensor)

    def close(self) -> None:
        """Let go of the memory."""
        self._views.clear()
        for slot in self.slots:
            slot.close()


def _view(memory: memoryview, place: TensorPlace) -> torch.Tensor | None:
    import torch

    if not place.size:
        return None
    raw = torch.frombuffer(memory, dtype=torch.uint8, count=place.size, offset=HEADER + place.offset)
    return raw.view(getattr(torch, place.dtype)).view(place.shape)


def save(step: int, /, *, check_finite: bool = False, **state: Any) -> None:
    """Take a snapshot of the training state; returns when it is copied.

    Call it on all ranks after the same step; with `trainer.should_stop`, before that. State that every rank has is
    held once per node: the worker of local rank 0 copies.

    Args:
        step: The script's own count of steps, over all epochs. A second call with the same step does nothing.
        check_finite: True to take no snapshot of a state whose tensors have NaN or infinity; the first is logged.
        **state: What has to come back, by name: objects with `state_dict` and `load_state_dict`, or plain values:
            numbers, strings, bytes, tensors, and dicts, lists and tuples of them. All ranks have the same.

    Raises:
        TypeError: The step is no whole number, or the state has something that a snapshot cannot hold.
        ValueError: The step is lower than that of the call before, or does not fit into 64 bits.
        OutOfMemoryError: The memory of the node or job does not suffice; the message names what is needed.
    """
    step = operator.index(step)
    memory = _memory()
    _disk.require_start()
    if memory is not None:
        found = {name: value.state_dict() if _is_stateful(value) else value for name, value in state.items()}
        memory.save(step, found, check_finite=check_finite)


def to_disk(path: str | os.PathLike[str], *, every: float = 600.0, keep: int = 2) -> None:
    """Have snapshots written to disk, in the background, and have `load` start from there if memory has none.

    Call it on all ranks before `load`. Under an agent, the agent of rank 0 writes; else the process of rank 0.

    Args:
        path: Directory of the checkpoints, which all nodes see; it is made if it is missing.
        every: Seconds between checkpoints.
        keep: Number of checkpoints that stay.

    Raises:
        ValueError: `every` is negative, or `keep` is less than 1.
        RuntimeError: `load` was called before.
    """
    if not every >= 0 or keep < 1:
        raise ValueError(f"every={every}, keep={keep}: checkpoints need 0 seconds or more, and one at least that stays")
    _disk.configure(os.path.abspath(os.fspath(path)), every, keep)  # noqa: PTH100 (pathlib takes time to import)


def load(**state: Any) -> Any:
    """Give the script the state that this round starts from, or leave it as it is.

    Objects with `load_state_dict` are loaded in place. After `to_disk` a round without a snapshot in memory starts from
    the newest checkpoint on disk. Rank 0 chooses it, and the other ranks get its choice through the store of the round.

    Args:
        **state: As in `save`, with the same names.

    Returns:
        The plain values: the value itself if there is one, a tuple in the order of the arguments if there are more,
        None if there is none. Unchanged if there is no snapshot to start from.

    Raises:
        KeyError: The snapshot has no state of a name.
        RuntimeError: The snapshot or checkpoint that the round starts from cannot be had.
    """
    memory = _memory()
    found = memory.load() if memory is not None else None
    if _disk.is_configured:
        found = _start_on_disk(memory, found)
    plain = []
    for name, value in state.items():
        if found is not None and name not in found:
            raise KeyError(f"the snapshot has no state {name!r}, only {', '.join(found)}; save and load the same names")
        if _is_stateful(value):
            if found is not None:
                value.load_state_dict(found[name])
        else:
            plain.append(value if found is None else found[name])
    if len(plain) > 1:
        return tuple(plain)
    return plain[0] if plain else None


def _is_stateful(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _start_on_disk(memory: WorkerMemory | None, found: dict[str, Any] | None) -> dict[str, Any] | None:
    """Record the start of this group in the directory of checkpoints, and return the state that it starts from."""
    global _attached
    if _disk.started is not None:
        return _disk.started.state if found is None else found
    origin = None if found is None or memory is None else memory.origin()
    started = _disk.start(origin, None if memory is None else memory.below)
    path = os.environ.get(VARIABLE)
    if started.directory is not None and path:
        try:
            name_directory(path, Request(_round(), started.directory))
        except HandOverError as error:
            raise RuntimeError(f"no checkpoint can be written: {error}") from None
    elif started.directory is not None:
        # Without an agent this process holds what it writes.
        _attached = memory = memory or WorkerMemory([Slot.make() for _ in range(SLOTS)], None, _round(), writes=True)
        _disk.write(started.directory, memory.slots, _round())
    return started.state if found is None else found


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
            _attached = _ask(path)
    return _attached


def _round() -> int:
    return int(os.environ.get("SLURM_ELASTIC_ROUND", "0"))


def _ask(path: str) -> WorkerMemory:
    round_ = _round()
    try:
        answered, descriptors = ask(path, Request(round_))
    except HandOverError as error:
        # Without it this rank would start from another state than the others.
        raise RuntimeError(f"the snapshot that round {round_} starts from cannot be had: {error}") from None
    writes = os.environ.get("LOCAL_RANK", "0") == "0"
    slots = [Slot(descriptor) for descriptor in descriptors]
    return WorkerMemory(slots, answered.slot, round_, writes=writes, below=answered.below)


def _forget() -> None:
    """Let go of the memory in a forked process, such as one of a data loader: it is no worker."""
    global _attached, _asked, _disk
    if _attached is not None:
        _attached.close()
    _attached, _asked, _disk = None, False, DiskSide()


os.register_at_fork(after_in_child=_forget)
