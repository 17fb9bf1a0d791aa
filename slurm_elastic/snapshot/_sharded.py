"""Sharded tensors (DTensor) of a worker: how they are divided, and what of a snapshot takes their places."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from slurm_elastic.snapshot.sharding import Layout, Mesh, Parts, Planner, Region, Sharded, region_of
from slurm_elastic.snapshot.state import PresentTensors, StateError, can_take

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement


def key_of(sharded: Sequence[DTensor]) -> tuple[object, ...]:
    """Return what the layout of these tensors depends on."""
    return tuple((tensor.dtype, tensor.shape, tensor.device_mesh, tensor.placements) for tensor in sharded)


def layout_of(sharded: Sequence[DTensor], rank: int, world: int, *, own: bool) -> Layout:
    """Return the layout of these tensors on a rank of a world; `own`: ranks have state of their own besides.

    Raises StateError if they are divided in a way that a snapshot does not have.
    """
    meshes: dict[Mesh, int] = {}
    tensors = []
    for tensor in sharded:
        mesh = _mesh_of(tensor.device_mesh)
        described = Sharded(
            str(tensor.dtype).removeprefix("torch."),
            tensor.dtype.itemsize,
            tuple(tensor.shape),
            meshes.setdefault(mesh, len(meshes)),
            tuple(map(_dimension, tensor.placements)),
        )
        region = region_of(described, mesh, rank)
        if region is not None and region.size != tuple(tensor.to_local().shape):
            raise StateError(
                f"a DTensor of shape {tuple(tensor.shape)} with {tuple(tensor.to_local().shape)} on rank {rank}: a"
                " snapshot holds tensors that are divided as by torch.chunk; save others by"
                " torch.distributed.checkpoint"
            )
        tensors.append(described)
    return Layout(world, own, tuple(meshes), tuple(tensors))


def locals_of(sharded: Sequence[DTensor]) -> list[torch.Tensor]:
    """Return what this rank has of these tensors, without those whose mesh does not have this rank."""
    with torch.no_grad():
        return [tensor.to_local() for tensor in sharded if tensor.device_mesh.get_coordinate() is not None]


def _mesh_of(mesh: DeviceMesh) -> Mesh:
    return Mesh(tuple(mesh.mesh.shape), tuple(mesh.mesh.flatten().tolist()))


def _dimension(placement: Placement) -> int | None:
    if type(placement) is Shard:
        return placement.dim
    if type(placement) is Replicate:
        return None
    raise StateError(
        f"a DTensor with placement {placement}: a snapshot holds those with Shard and Replicate; save others by"
        " torch.distributed.checkpoint"
    )


class _Division(NamedTuple):
    """The way in which a tensor is divided now."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    device: torch.device


def restore(
    views: Sequence[torch.Tensor], planner: Planner | None, present: PresentTensors, rank: int, parts: Parts
) -> tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]]:
    """Return the tensors and the sharded tensors that are wanted of a snapshot, divided as those of the present state.

    A sharded tensor that the present state does not have yet, such as an optimizer's before its first step, is divided
    as present tensors are that were divided like it. The views of the snapshot stay as they are.

    Raises:
        StateError: A tensor is divided in a way that is not known.
        ValueError: A part does not fit the layout.
    """
    targets = present.found
    tensors: dict[int, torch.Tensor] = {}
    for index, view in enumerate(views):
        target = targets.get(("x", index))
        if ("x", index) not in present.wanted:
            continue
        if isinstance(target, DTensor) and target.shape == view.shape:
            now, shape = _division(target), tuple(view.shape)
            local = view[_region(shape, now, rank).within(Region((0,) * view.dim(), shape))].clone()
            tensors[index] = _divided(local, shape, now)
        else:
            tensors[index] = present.copied(index, view)
    if planner is None:
        return tensors, {}
    layout = planner.layout
    divisions: dict[tuple[object, ...], _Division] = {}
    for (kind, index), target in targets.items():
        if kind == "s" and isinstance(target, DTensor):
            saved = layout.tensors[index]
            divisions.setdefault((saved.mesh, saved.dimensions), _division(target))
    wanted = {index: saved for index, saved in enumerate(layout.tensors) if ("s", index) in present.wanted}
    regions: dict[int, tuple[_Division | None, Region]] = {}
    for index, saved in wanted.items():
        target = targets.get(("s", index))
        division = _division(target) if isinstance(target, DTensor) else None
        if target is None:
            division = divisions.get((saved.mesh, saved.dimensions))
            if division is None and divisions:
                raise StateError(
                    f"a tensor of shape {saved.shape} of the snapshot has no place in the present state, and no other"
                    " tensor was divided like it: load all that was saved together by one call of snapshot.load"
                )
        whole = Region((0,) * len(saved.shape), saved.shape)
        regions[index] = division, whole if division is None else _region(saved.shape, division, rank)
    pieces = {index: [*planner.pieces(index, region)] for index, (_, region) in regions.items()}
    parts.expect((index, piece) for index, group in pieces.items() for piece in group)
    sharded: dict[int, torch.Tensor] = {}
    for index, saved in wanted.items():
        division, region = regions[index]
        target = targets.get(("s", index))
        dtype = getattr(torch, saved.dtype)
        with torch.no_grad():
            own = target.to_local() if isinstance(target, DTensor) and present.takes("s", index) else None
            fits = own is not None and can_take(own, dtype, region.size)
            local = own if own is not None and fits else torch.empty(region.size, dtype=dtype)
            for piece in pieces[index]:
                local[piece.region.within(region)] = parts.shard(index, piece)[piece.region.within(piece.shard)]
        sharded[index] = local if division is None else _divided(local, saved.shape, division)
    return tensors, sharded


def _division(tensor: DTensor) -> _Division:
    return _Division(tensor.device_mesh, tuple(tensor.placements), tensor.to_local().device)


def _region(shape: tuple[int, ...], division: _Division, rank: int) -> Region:
    """Return what this rank has of a tensor; no elements if it is not in the mesh."""
    tensor = Sharded("", 0, shape, 0, tuple(map(_dimension, division.placements)))
    nothing = Region((0,) * len(shape), (0,) * len(shape))
    return region_of(tensor, _mesh_of(division.mesh), rank) or nothing


def _divided(local: torch.Tensor, shape: tuple[int, ...], division: _Division) -> DTensor:
    return DTensor.from_local(
        local.to(division.device),
        division.mesh,
        division.placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=torch.empty(shape, device="meta").stride(),
    )
