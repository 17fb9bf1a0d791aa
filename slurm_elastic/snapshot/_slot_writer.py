"""Copies the tensors of a worker into the slot that is needed least."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from slurm_elastic.snapshot.lineage import Copy, slot_to_write
from slurm_elastic.snapshot.memory import HEADER, Contents, Slot, require_memory
from slurm_elastic.snapshot.state import Table, tensor_in

if TYPE_CHECKING:
    import torch


_PORTABLE = 1
"""cudaHostRegisterPortable: every CUDA context of the process knows that the memory is locked (CUDA runtime API)."""


class SlotWriter:
    """Writes into the slots of an agent in turn, for one worker."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.slots = slots
        self._views: dict[int, tuple[object, Table, list[torch.Tensor]]] = {}
        """By slot: its mapping, of which there is another one when it has grown, and the tensors of a table in that."""
        self._pinned: dict[int, int | None] = {}
        """By slot: the address of the mapping whose pages CUDA has locked; None if it has refused."""

    def write(self, copy: Copy, description: bytes, table: Table, tensors: list[torch.Tensor], shards: int = 0) -> None:
        """Write a snapshot, or a part of one, with tensors at the places of a table; raises OutOfMemoryError.

        The tensors begin with `shards` bytes of shards.
        """
        needed = slot_size(table, description)
        if any(slot.mapped < needed for slot in self.slots):
            require_memory(needed, self.slots)
        busy = [index for index, slot in enumerate(self.slots) if slot.busy]
        index = slot_to_write([slot.snapshot for slot in self.slots], busy, self.slots[0].protection)
        if index is None:
            # All that could be overwritten is being written to disk: this step has no snapshot.
            return
        contents = Contents(copy, table.size, len(description), shards)
        body = self.slots[index].memory(contents.size)[HEADER : contents.size]

        def put() -> None:
            self._copy(index, table, tensors, body)
            body[table.size :] = description

        self.slots[index].fill(contents, put)

    def _copy(self, index: int, table: Table, tensors: list[torch.Tensor], memory: memoryview) -> None:
        mapping, of, views = self._views.get(index, (None, None, []))
        if mapping is not memory.obj or of is not table:
            if mapping is not memory.obj:
                self._unpin(index)
            views = [tensor_in(memory, place.dtype, place.shape, place.offset) for place in table.places if place.size]
            self._views[index] = memory.obj, table, views
        if len(views) < len(tensors):
            tensors = [tensor for tensor, place in zip(tensors, table.places, strict=True) if place.size]
        if views:
            # The views hold the mapping until CUDA has forgotten it.
            if index not in self._pinned and any(tensor.is_cuda for tensor in tensors):
                self._pin(index, memory)
            _copy_all(views, tensors)

    def _pin(self, index: int, memory: memoryview) -> None:
        """Have CUDA lock the pages of a slot: a GPU then writes them itself, and no copy waits for the one before it.

        Where CUDA refuses, as beyond the system's limit, copies go through a buffer of the driver, as they did.
        """
        import torch

        address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        refused = int(_cudart().cudaHostRegister(address, len(memory), _PORTABLE))
        self._pinned[index] = None if refused else address
        if refused:
            # CUDA keeps the error, and the next kernel would be blamed for it: so one is started that is.
            with contextlib.suppress(RuntimeError):
                torch.ones(1, device="cuda")

    def _unpin(self, index: int) -> None:
        """Have CUDA forget the mapping of a slot, which its views still hold."""
        if (pinned := self._pinned.pop(index, None)) is not None:
            _cudart().cudaHostUnregister(pinned)

    def close(self) -> None:
        """Let go of the memory."""
        for index in tuple(self._pinned):
            self._unpin(index)
        self._views.clear()
        for slot in self.slots:
            slot.close()


def slot_size(table: Table, description: bytes) -> int:
    """Return the bytes of a slot for a state. Plain values change their length, so there is room for twice as much."""
    return HEADER + table.size + 2 * len(description)


def _cudart() -> Any:
    from torch import cuda

    # Documented, without types (torch 2.15).
    runtime: Any = cuda.cudart
    return runtime()


def _copy_all(views: list[torch.Tensor], tensors: list[torch.Tensor]) -> None:
    import torch

    plain = (torch.Tensor, torch.nn.Parameter)
    # A loop, as a generator takes twice as long.
    for tensor in tensors:
        if type(tensor) not in plain or not tensor.is_cpu or tensor.requires_grad:
            break
    else:
        # One call into torch for all tensors. FSDP2 calls it, too (torch 2.11 and later).
        torch._foreach_copy_(views, tensors)
        return
    # A subclass may have copy_ alone, and tensors may be on several devices.
    with torch.no_grad():
        for view, tensor in zip(views, tensors, strict=True):
            view.copy_(tensor, non_blocking=tensor.is_cuda)
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
