"""Computes where in a snapshot the elements of sharded tensors are, and which of them another world needs. Pure.

A layout says, for all sharded tensors of a snapshot, how they are divided: by dimensions, along those of a mesh of
ranks, as torch.chunk divides. So each process computes by itself where each element is. The shards of a rank lie one
after the other in its part, in the order of the layout. Ranks that hold the same shards write the same part.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

_ALIGNMENT = 64
"""Each tensor in a slot begins at a multiple of this."""
_MOST_BETWEEN = 1.25
"""Bytes of ranges, as a multiple of those needed, at most: else a part is needed as a whole."""
_MOST_RANGES = 256
"""Ranges of a part, at most: a request for them is one message."""
Ranges = tuple[tuple[int, int], ...]
"""Where ranges of bytes begin and end, in order."""


def round_up(offset: int) -> int:
    """Return the next offset at which a tensor may begin."""
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True, slots=True)
class Mesh:
    """A mesh of ranks, in the order of its flattened positions."""

    shape: tuple[int, ...]
    ranks: tuple[int, ...]

    def position(self, rank: int) -> tuple[int, ...] | None:
        """Return the position of a rank; None if it is not in the mesh."""
        if rank not in self.ranks:
            return None
        index, position = self.ranks.index(rank), []
        for size in reversed(self.shape):
            index, at = divmod(index, size)
            position.append(at)
        return tuple(reversed(position))


@dataclass(frozen=True, slots=True)
class Sharded:
    """A tensor that is divided among ranks.

    Attributes:
        dtype: Name of its type, such as ``float32``.
        item: Bytes of an element.
        mesh: Index of the mesh in the layout.
        dimensions: For each dimension of the mesh, the dimension of the tensor that is divided along it; None where the
            ranks have the same.
    """

    dtype: str
    item: int
    shape: tuple[int, ...]
    mesh: int
    dimensions: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Region:
    """A box of elements of a tensor: where it begins, and its size, for each dimension."""

    start: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def count(self) -> int:
        """Number of its elements."""
        return math.prod(self.size)

    def overlap(self, other: Region) -> Region | None:
        """Return what both contain; None if that is nothing."""
        start = tuple(map(max, self.start, other.start))
        ends = [min(a + b, c + d) for a, b, c, d in zip(self.start, self.size, other.start, other.size, strict=True)]
        size = tuple(end - at for end, at in zip(ends, start, strict=True))
        return Region(start, size) if all(length > 0 for length in size) else None

    def within(self, other: Region) -> tuple[slice, ...]:
        """Return the indices of this region in one that contains it."""
        return tuple(
            slice(at - base, at - base + size)
            for at, base, size in zip(self.start, other.start, self.size, strict=True)
        )


@dataclass(frozen=True, slots=True)
class Piece:
    """The elements that a part has of a wanted region, and the shard that they belong to, at an offset in its bytes."""

    part: int
    offset: int
    shard: Region
    region: Region


class Parts(Protocol):
    """The parts of a snapshot, in memory or on disk."""

    def expect(self, pieces: Iterable[tuple[int, Piece]], /) -> None:
        """Note the pieces that will be asked for, each with the index of its tensor."""
        ...

    def shard(self, index: int, piece: Piece, /) -> torch.Tensor:
        """Return the shard of a sharded tensor, by its index, to which a piece belongs. It may lack other elements."""
        ...

    def own(self, rank: int, /) -> dict[str, Any]:
        """Return what a rank had of its own."""
        ...


def needed_ranges(layout: Layout, pieces: Iterable[tuple[int, Piece]]) -> dict[int, Ranges | None]:
    """Return, by part, which bytes of it have these pieces of tensors, given by index; a message has room for them.

    It is None if many other bytes lie between the pieces, as in a tensor that is divided by columns: the part is needed
    as a whole then, which the workers of a node share.
    """
    ranges: dict[int, list[tuple[int, int]]] = {}
    needed: dict[int, int] = {}
    for index, piece in pieces:
        item = layout.tensors[index].item
        ranges.setdefault(piece.part, []).append(byte_range(piece, item))
        needed[piece.part] = needed.get(piece.part, 0) + piece.region.count * item
    by_part = {part: merged(pieces, _MOST_RANGES) for part, pieces in ranges.items()}
    return {
        part: pieces if sum(end - begin for begin, end in pieces) <= _MOST_BETWEEN * needed[part] else None
        for part, pieces in by_part.items()
    }


def expected_ranges(layout: Layout, rank: int, world: int) -> dict[int, Ranges | None]:
    """Return which bytes of the parts a rank of the next world needs, if tensors are divided as they were.

    It is empty if meshes are not of all ranks in one dimension: how they change with the number of ranks only the
    script knows.
    """
    if any(mesh != _mesh_of_all(layout.world) for mesh in layout.meshes):
        return {}
    planner, mesh = Planner(layout), _mesh_of_all(world)
    pieces = (
        (index, piece)
        for index, tensor in enumerate(layout.tensors)
        if (region := region_of(tensor, mesh, rank)) is not None
        for piece in planner.pieces(index, region)
    )
    return needed_ranges(layout, pieces)


def _mesh_of_all(world: int) -> Mesh:
    return Mesh((world,), tuple(range(world)))


def byte_range(piece: Piece, item: int) -> tuple[int, int]:
    """Return where in its part a piece of such items begins and ends, with what lies between its elements."""
    first = last = 0
    for at, base, count, size in zip(
        piece.region.start, piece.shard.start, piece.region.size, piece.shard.size, strict=True
    ):
        first = first * size + at - base
        last = last * size + at - base + count - 1
    return piece.offset + first * item, piece.offset + (last + 1) * item


def merged(ranges: Iterable[tuple[int, int]], most: int) -> Ranges:
    """Return ranges that contain these, in order, without overlaps, and at most `most`, 1 or more.

    Those with the smallest gaps between them become one.
    """
    joined: list[tuple[int, int]] = []
    for begin, end in sorted(ranges):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((begin, end))
    gaps = sorted(range(1, len(joined)), key=lambda index: joined[index][0] - joined[index - 1][1], reverse=True)
    bounds = [0, *sorted(gaps[: most - 1]), len(joined)]
    return tuple((joined[first][0], joined[end - 1][1]) for first, end in pairwise(bounds) if first < end)


def region_of(tensor: Sharded, mesh: Mesh, rank: int) -> Region | None:
    """Return what a rank has of a tensor, maybe no elements; None if the rank is not in its mesh."""
    position = mesh.position(rank)
    if position is None:
        return None
    start, size = [0] * len(tensor.shape), list(tensor.shape)
    for at, ranks, dimension in zip(position, mesh.shape, tensor.dimensions, strict=True):
        if dimension is not None:
            # As torch.chunk: all have the same, rounded up, as long as there is something left.
            most, whole = -(-size[dimension] // ranks), size[dimension]
            begin = min(whole, most * at)
            start[dimension] += begin
            size[dimension] = min(whole, begin + most) - begin
    return Region(tuple(start), tuple(size))


@dataclass(frozen=True, slots=True)
class Layout:
    """The division of all sharded tensors of a snapshot among a world; `own`: ranks have state of their own besides."""

    world: int
    own: bool
    meshes: tuple[Mesh, ...]
    tensors: tuple[Sharded, ...]


class Planner:
    """The places of all shards in the parts of a layout; computed once."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.part_numbers = _part_numbers(layout)
        """The number of the part that each rank writes."""
        self._shards: dict[int, tuple[list[tuple[int, Region] | None], int]] = {}

    @property
    def parts(self) -> int:
        """Number of different parts."""
        return max(self.part_numbers, default=-1) + 1

    def shards(self, rank: int) -> tuple[list[tuple[int, Region] | None], int]:
        """Return the offset in its part and the region of what a rank has of each tensor, and the bytes of all."""
        if rank not in self._shards:
            shards: list[tuple[int, Region] | None] = []
            offset = 0
            for tensor in self.layout.tensors:
                region = region_of(tensor, self.layout.meshes[tensor.mesh], rank)
                shards.append(None if region is None else (offset, region))
                offset = round_up(offset + (0 if region is None else region.count * tensor.item))
            self._shards[rank] = shards, offset
        return self._shards[rank]

    def pieces(self, index: int, target: Region) -> Iterator[Piece]:
        """Yield what makes up a region of a tensor, by its index: each element once."""
        tensor = self.layout.tensors[index]
        mesh = self.layout.meshes[tensor.mesh]
        for position in _positions(mesh, tensor, target):
            index_in_mesh = 0
            for at, size in zip(position, mesh.shape, strict=True):
                index_in_mesh = index_in_mesh * size + at
            rank = mesh.ranks[index_in_mesh]
            own = self.shards(rank)[0][index]
            assert own is not None
            offset, shard = own
            overlap = shard.overlap(target)
            if overlap is not None:
                yield Piece(self.part_numbers[rank], offset, shard, overlap)


def _part_numbers(layout: Layout) -> tuple[int, ...]:
    if layout.own:
        return tuple(range(layout.world))
    kinds = list(dict.fromkeys((tensor.mesh, tensor.dimensions) for tensor in layout.tensors))
    numbers: dict[tuple[object, ...], int] = {}
    numbers_of_ranks = []
    for rank in range(layout.world):
        regions = tuple(_divided(layout.meshes[mesh], dimensions, rank) for mesh, dimensions in kinds)
        numbers_of_ranks.append(numbers.setdefault(regions, len(numbers)))
    return tuple(numbers_of_ranks)


def _divided(mesh: Mesh, dimensions: Sequence[int | None], rank: int) -> tuple[int, ...] | None:
    position = mesh.position(rank)
    if position is None:
        return None
    return tuple(at for at, dimension in zip(position, dimensions, strict=True) if dimension is not None)


def _positions(mesh: Mesh, tensor: Sharded, target: Region) -> Iterator[tuple[int, ...]]:
    """Yield one position of the mesh for each different shard that may have elements of a region."""
    ranges = []
    for ranks, dimension in zip(mesh.shape, tensor.dimensions, strict=True):
        if dimension is None:
            ranges.append(range(1))
        elif tensor.dimensions.count(dimension) > 1:
            # What is divided twice has shards of several sizes.
            ranges.append(range(ranks))
        else:
            most = max(1, -(-tensor.shape[dimension] // ranks))
            begin, size = target.start[dimension], target.size[dimension]
            ranges.append(range(begin // most, -(-(begin + size) // most)))
    return product(*ranges)
