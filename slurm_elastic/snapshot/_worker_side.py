"""The worker's side: copies its state into the memory of the agent, and starts from what is there."""

from __future__ import annotations

import hashlib
import logging
import operator
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from slurm_elastic.snapshot.hand_over import VARIABLE, HandOverError, Request, ask
from slurm_elastic.snapshot.lineage import Copy, SnapshotId, slot_to_write
from slurm_elastic.snapshot.memory import Slot, require_memory
from slurm_elastic.snapshot.slots import HEADER
from slurm_elastic.snapshot.state import Table, TensorPlace, describe, flatten, table_of, unflatten

if TYPE_CHECKING:
    import torch

__all__ = ["load", "save"]

logger = logging.getLogger("slurm_elastic")


class WorkerMemory:
    """The slots of the agent, as a worker uses them.

    Args:
        slots: Of the agent.
        start: Index of the slot that this worker starts from; None for none.
        round_: The round of this worker.
        writes: True if this worker writes snapshots for its node.
    """

    def __init__(self, slots: list[Slot], start: int | None, round_: int, *, writes: bool) -> None:
        self._slots, self._start, self._round, self._writes = slots, start, round_, writes
        self._saved: int | None = None
        self._refused = False
        self._table: tuple[tuple[Any, ...], Table] | None = None
        self._views: dict[int, tuple[int, Table, list[torch.Tensor | None]]] = {}

    def load(self) -> dict[str, Any] | None:
        """Return the state of the snapshot that the round starts from; None if it starts from none."""
        if self._start is None:
            return None
        slot = self._slots[self._start]
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
        require_memory(HEADER + table.size + 2 * len(description), self._slots)
        held = [slot.contents() for slot in self._slots]
        index = slot_to_write([None if each is None else each.copy.id for each in held])
        digest = hashlib.blake2b(description, digest_size=8).hexdigest()
        self._slots[index].fill(
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

        slot = self._slots[index]
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
        for slot in self._slots:
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
    if memory is not None:
        found = {name: value.state_dict() if _is_stateful(value) else value for name, value in state.items()}
        memory.save(step, found, check_finite=check_finite)


def load(**state: Any) -> Any:
    """Give the script the state that this round starts from, or leave it as it is.

    Objects with `load_state_dict` are loaded in place.

    Args:
        **state: As in `save`, with the same names.

    Returns:
        The plain values: the value itself if there is one, a tuple in the order of the arguments if there are more,
        None if there is none. Unchanged if there is no snapshot to start from.

    Raises:
        KeyError: The snapshot has no state of a name.
        RuntimeError: The snapshot that the round starts from cannot be had.
    """
    memory = _memory()
    found = memory.load() if memory is not None else None
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


_attached: WorkerMemory | None = None
_asked = False


def _memory() -> WorkerMemory | None:
    """Return the memory of the agent; None without one."""
    global _attached, _asked
    if not _asked:
        _asked = True
        path = os.environ.get(VARIABLE)
        if path:
            _attached = _ask(path)
    return _attached


def _ask(path: str) -> WorkerMemory:
    round_ = int(os.environ.get("SLURM_ELASTIC_ROUND", "0"))
    try:
        answered, descriptors = ask(path, Request(round_))
    except HandOverError as error:
        # Without it this rank would start from another state than the others.
        raise RuntimeError(f"the snapshot that round {round_} starts from cannot be had: {error}") from None
    writes = os.environ.get("LOCAL_RANK", "0") == "0"
    return WorkerMemory([Slot(descriptor) for descriptor in descriptors], answered.slot, round_, writes=writes)


def _forget() -> None:
    """Let go of the memory in a forked process, such as one of a data loader: it is no worker."""
    global _attached, _asked
    if _attached is not None:
        _attached.close()
    _attached, _asked = None, False


os.register_at_fork(after_in_child=_forget)
