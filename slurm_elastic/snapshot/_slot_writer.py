"""Copies the tensors of a worker into the slot that is needed least."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from slurm_elastic.snapshot.lineage import Copy, slot_to_write
from slurm_elastic.snapshot.memory import Slot, require_memory
from slurm_elastic.snapshot.slots import HEADER
from slurm_elastic.snapshot.state import Table, TensorPlace

if TYPE_CHECKING:
    import torch

__all__ = ["SlotWriter"]


class SlotWriter:
    """Writes into the slots of an agent, for one worker.

    Args:
        slots: To write in turn.
    """

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.slots = slots
        self._views: dict[int, tuple[int, Table, list[torch.Tensor | None]]] = {}

    def write(
        self, copy: Copy, description: bytes, table: Table, tensors: Sequence[torch.Tensor], shards: int = 0
    ) -> None:
        """Write a snapshot, or a part of one.

        Args:
            copy: What it is.
            description: Of the state.
            table: The places of the tensors.
            tensors: To copy.
            shards: Bytes of the shards that they begin with.

        Raises:
            OutOfMemoryError: The memory of the node or job does not suffice.
        """
        # Plain values change their length.
        require_memory(HEADER + table.size + 2 * len(description), self.slots)
        held = [slot.contents() for slot in self.slots]
        busy = [index for index, slot in enumerate(self.slots) if slot.busy]
        ids = [None if each is None else each.copy.id for each in held]
        index = slot_to_write(ids, busy, self.slots[0].protection)
        if index is None:
            # All that could be overwritten is being written to disk: this step has no snapshot.
            return
        self.slots[index].fill(copy, table.size, description, lambda body: self._copy(index, table, tensors), shards)

    def _copy(self, index: int, table: Table, tensors: Sequence[torch.Tensor]) -> None:
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
