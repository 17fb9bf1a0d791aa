"""The parts of a state that one rank has: its shards and its own values, taken apart and put together again."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from slurm_elastic.snapshot.hand_over import Request, ask
from slurm_elastic.snapshot.lineage import Copy
from slurm_elastic.snapshot.memory import HEADER, Contents, Slot
from slurm_elastic.snapshot.sharding import Layout, Parts, Piece, Planner, Ranges, needed_ranges
from slurm_elastic.snapshot.state import (
    PER_RANK,
    Flat,
    PresentTensors,
    StateError,
    flatten,
    read_slot,
    rebuild,
    tensor_in,
)

if TYPE_CHECKING:
    import torch


class Part(NamedTuple):
    """One rank's part of `of` parts: its shards, and then the state of its own.

    Attributes:
        shards: Bytes of the shards.
    """

    number: int
    of: int
    description: bytes
    tensors: list[torch.Tensor]
    shards: int


class PartsOfOrigin:
    """The parts of the origin, from the agent at a socket; there are none without an agent, or without a layout."""

    def __init__(self, path: str | None, round_: int, origin: Copy, layout: Layout | None) -> None:
        self._path, self._round, self._origin, self._layout = path, round_, origin, layout
        self._read: dict[int, tuple[Slot, Contents]] = {}
        self._ranges: dict[int, Ranges | None] = {}

    def expect(self, pieces: Iterable[tuple[int, Piece]]) -> None:
        """Note which bytes of each part are needed: another agent sends no others."""
        assert self._layout is not None
        self._ranges = needed_ranges(self._layout, pieces)

    def shard(self, index: int, piece: Piece) -> torch.Tensor:
        """Return the shard of a sharded tensor to which these elements belong, in the memory of the agent."""
        assert self._layout is not None
        slot, contents = self._get(piece.part)
        shards = slot.memory()[HEADER : HEADER + contents.shards]
        return tensor_in(shards, self._layout.tensors[index].dtype, piece.shard.size, piece.offset)

    def own(self, rank: int) -> dict[str, Any]:
        """Return what a rank had of its own."""
        slot, contents = self._get(rank)
        tree, views, _ = read_slot(slot, contents)
        content: dict[str, Any] = rebuild(tree, [view.clone() for view in views])[PER_RANK]
        return content

    def are_unchanged(self) -> bool:
        """Return True if no worker has written into what was read, so that it is what it was taken for."""
        return all(slot.contents() == contents for slot, contents in self._read.values())

    def _get(self, part: int) -> tuple[Slot, Contents]:
        if part not in self._read:
            assert self._path is not None
            # What a rank had of its own comes without any shards.
            request = Request(self._round, part=part, ranges=self._ranges.get(part, ()))
            _, (slot,) = ask(self._path, request, snapshot_missing(self._round))
            contents = slot.contents()
            copy = Copy.of_part(self._origin.id, part, self._origin.parts)
            if contents is None or contents.copy != copy:
                raise RuntimeError("snapshot.load comes too late: call it on all ranks before the first snapshot.save")
            self._read[part] = slot, contents
        return self._read[part]


def restored_state(
    tree: Mapping[str, Any],
    tensors: Sequence[torch.Tensor],
    layout: Layout | None,
    parts: Parts,
    present: Callable[[], Mapping[str, Any]],
    in_place: Collection[str],
) -> dict[str, Any]:
    """Return the state of a tree, see `flatten`, with sharded tensors divided as those of the present state.

    `layout` is None if it has no parts. What ranks had of their own is a list there, if the present state has its name.
    """
    asked = present()
    places = PresentTensors(tree, asked, in_place)
    if "torch.distributed.tensor" in sys.modules or (layout is not None and layout.tensors):
        from slurm_elastic.snapshot._sharded import restore

        planner = None if layout is None else Planner(layout)
        loaded, sharded = restore(tensors, planner, places, global_rank(), parts)
    else:
        wanted = (index for kind, index in places.found if kind == "x")
        loaded, sharded = {index: places.copied(index, tensors[index]) for index in wanted}, {}
    # What is not asked for stays in the memory of agents: shards of other nodes, too.
    restored: dict[str, Any] = dict.fromkeys(tree)
    restored |= rebuild({name: node for name, node in tree.items() if name in asked}, loaded, sharded)
    if PER_RANK in asked and layout is not None and layout.own:
        restored[PER_RANK] = [parts.own(rank) for rank in range(layout.world)]
    return restored


def own_state(per_rank: Mapping[str, Any]) -> Flat:
    """Return the state that this rank alone has; raises StateError if it has sharded tensors."""
    flat = flatten({PER_RANK: dict(per_rank)})
    if flat.sharded:
        raise StateError("per_rank has a DTensor: pass sharded state beside it, as part of the state of all ranks")
    return flat


def global_rank() -> int:
    """Return the rank of this worker."""
    return int(os.environ.get("RANK", "0"))


def snapshot_missing(round_: int) -> str:
    """Return why a rank fails that would start from another state than the others."""
    return f"the snapshot that round {round_} starts from cannot be had"
