"""Where the elements of sharded tensors are."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

from slurm_elastic.snapshot.sharding import (
    Layout,
    Mesh,
    Piece,
    Planner,
    Region,
    Sharded,
    byte_range,
    expected_ranges,
    merged,
    needed_ranges,
    region_of,
)

SHAPES = [(), (1,), (7,), (8, 3), (5, 4, 2), (0, 3)]
MESHES = [Mesh((4,), (0, 1, 2, 3)), Mesh((2, 3), (5, 4, 3, 2, 1, 0)), Mesh((2, 2), (0, 2, 4, 6))]


def sharded(shape: tuple[int, ...], mesh: Mesh) -> list[Sharded]:
    choices = [None, *range(len(shape))]
    return [Sharded("float32", 4, shape, 0, each) for each in itertools.product(choices, repeat=len(mesh.shape))]


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("shape", SHAPES)
def test_ranks_have_what_torch_gives_them(shape: tuple[int, ...], mesh: Mesh) -> None:
    for tensor in sharded(shape, mesh):
        placements = [Replicate() if each is None else Shard(each) for each in tensor.dimensions]
        for rank in mesh.ranks:
            position = mesh.position(rank)
            assert position is not None
            size, start = _compute_local_shape_and_global_offset(shape, mesh.shape, list(position), placements)
            region = region_of(tensor, mesh, rank)
            assert region is not None
            assert region.size == size
            if region.count:
                assert region.start == start
        assert region_of(tensor, mesh, 99) is None


@pytest.mark.parametrize("old", MESHES)
@pytest.mark.parametrize("new", MESHES)
@pytest.mark.parametrize("own", [True, False])
def test_another_world_finds_each_element_once(old: Mesh, new: Mesh, own: bool) -> None:
    for shape in SHAPES:
        whole = torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
        for tensor in sharded(shape, old):
            planner = Planner(
                Layout(7, own, (old,), (Sharded("float32", 4, (3,), 0, (None,) * len(old.shape)), tensor))
            )
            for wanted in sharded(shape, new)[:: 3 if len(shape) > 2 else 1]:
                for rank in new.ranks:
                    region = region_of(wanted, new, rank)
                    assert region is not None
                    assert torch.equal(assembled(planner, region, whole), part_of(whole, region))


def assembled(planner: Planner, region: Region, whole: torch.Tensor) -> torch.Tensor:
    found = torch.full(region.size, -1.0)
    for piece in planner.pieces(1, region):
        ranks = [rank for rank, number in enumerate(planner.part_numbers) if number == piece.part]
        # Each rank that writes this part has the same there.
        assert {(piece.offset, piece.shard)} == {planner.shards(rank)[0][1] for rank in ranks}
        assert bool((found[piece.region.within(region)] == -1.0).all())
        found[piece.region.within(region)] = part_of(whole, piece.shard)[piece.region.within(piece.shard)]
    return found


def part_of(whole: torch.Tensor, region: Region) -> torch.Tensor:
    return whole[region.within(Region((0,) * whole.dim(), tuple(whole.shape)))]


def test_ranks_that_hold_the_same_write_the_same_part() -> None:
    mesh = Mesh((2, 2), (0, 1, 2, 3))
    # Shards within a node, the same on both nodes.
    hybrid = Sharded("float32", 4, (8,), 0, (None, 0))
    assert Planner(Layout(4, False, (mesh,), (hybrid,))).part_numbers == (0, 1, 0, 1)
    assert Planner(Layout(4, True, (mesh,), (hybrid,))).part_numbers == (0, 1, 2, 3)
    both = (hybrid, Sharded("float32", 4, (8,), 0, (0, 0)))
    assert Planner(Layout(4, False, (mesh,), both)).part_numbers == (0, 1, 2, 3)
    # A rank outside of the mesh has a part without shards.
    assert Planner(Layout(5, False, (mesh,), (hybrid,))).part_numbers == (0, 1, 0, 1, 2)
    assert Planner(Layout(5, False, (mesh,), (hybrid,))).parts == 3


def test_the_bytes_of_a_piece_are_those_from_its_first_element_to_its_last() -> None:
    shard = Region((2, 0, 4), (3, 4, 5))
    offsets = torch.arange(60).view(shard.size) * 4 + 100
    starts, sizes = itertools.product((2, 4), (0, 1), (4, 8)), itertools.product((1,), (1, 3), (1,))
    for start, size in itertools.product(starts, sizes):
        region = Region(start, size)
        found = offsets[region.within(shard)]
        assert byte_range(Piece(0, 100, shard, region), 4) == (int(found.min()), int(found.max()) + 4)
    assert byte_range(Piece(0, 100, Region((), ()), Region((), ())), 8) == (100, 108)


def test_ranges_become_one_where_they_touch_and_where_the_gaps_are_smallest() -> None:
    ranges = [(10, 20), (90, 95), (0, 10), (15, 30), (40, 50), (52, 60)]
    assert merged(ranges, 9) == ((0, 30), (40, 50), (52, 60), (90, 95))
    assert merged(ranges, 3) == ((0, 30), (40, 60), (90, 95))
    assert merged(ranges, 2) == ((0, 60), (90, 95))
    assert merged(ranges, 1) == ((0, 95),)
    assert merged([], 4) == ()


def test_a_part_is_needed_as_a_whole_where_other_bytes_lie_between_the_pieces() -> None:
    mesh = Mesh((4,), (0, 1, 2, 3))
    for dimension, ranges in ((0, {1: ((0, 128),)}), (1, {1: None})):
        layout = Layout(4, False, (mesh,), (Sharded("float32", 4, (16, 16), 0, (dimension,)),))
        half = Region((4, 0), (2, 16)) if dimension == 0 else Region((0, 4), (16, 2))
        pieces = [(0, piece) for piece in Planner(layout).pieces(0, half)]
        assert needed_ranges(layout, pieces) == ranges


@pytest.mark.parametrize("world", [1, 2, 3, 5, 8])
def test_what_ranks_of_the_next_world_need_is_foreseen_where_all_divide_one_dimension(world: int) -> None:
    old, new = Mesh((4,), (0, 1, 2, 3)), Mesh((world,), tuple(range(world)))
    tensors = tuple(Sharded("float32", 4, shape, 0, (0,)) for shape in [(16, 4), (7,), (2, 3), (0, 3)])
    layout = Layout(4, False, (old,), tensors)
    planner = Planner(layout)
    for rank in range(world):
        pieces = [
            (index, piece)
            for index, tensor in enumerate(tensors)
            for region in [region_of(tensor, new, rank)]
            if region is not None
            for piece in planner.pieces(index, region)
        ]
        assert expected_ranges(layout, rank, world) == needed_ranges(layout, pieces)
    columns = Layout(4, False, (old,), (Sharded("float32", 4, (16, 16), 0, (1,)),))
    assert expected_ranges(columns, 0, 8) == {0: None}


def test_what_ranks_need_is_not_foreseen_where_only_the_script_knows_the_next_mesh() -> None:
    for mesh in (Mesh((2, 2), (0, 1, 2, 3)), Mesh((4,), (3, 2, 1, 0)), Mesh((2,), (0, 1))):
        tensor = Sharded("float32", 4, (16,), 0, (0,) * len(mesh.shape))
        assert expected_ranges(Layout(4, False, (mesh,), (tensor,)), 0, 3) == {}
