"""Sharded tensors (DTensor) of a worker: how they are divided, and what of a snapshot takes their places."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

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
    tensors: dict[int, torch.Tensor] = {}
    for index, view in enumerate(views):
        if ("x", index) not in present.found:
            continue
        target = present.found["x", index]
        if isinstance(target, DTensor) and target.shape == view.shape:
            shape = tuple(view.shape)
            local = view[_region(shape, target, rank).within(Region((0,) * view.dim(), shape))].clone()
            tensors[index] = _divided(local, shape, target)
        else:
            tensors[index] = present.copied(index, view)
    if planner is None:
        return tensors, {}
    saved_tensors = planner.layout.tensors
    targets = {index: present.found["s", index] for index in range(len(saved_tensors)) if ("s", index) in present.found}
    divided: dict[tuple[object, ...], DTensor] = {}
    for index, target in targets.items():
        if isinstance(target, DTensor):
            saved = saved_tensors[index]
            divided.setdefault((saved.mesh, saved.dimensions), target)
    regions: dict[int, tuple[DTensor | None, Region]] = {}
    for index, target in targets.items():
        saved, like = saved_tensors[index], target if isinstance(target, DTensor) else None
        if target is None:
            like = divided.get((saved.mesh, saved.dimensions))
            if like is None and divided:
                raise StateError(
                    f"a tensor of shape {saved.shape} of the snapshot has no place in the present state, and no other"
                    " tensor was divided like it: load all that was saved together by one call of snapshot.load"
                )
        whole = Region((0,) * len(saved.shape), saved.shape)
        regions[index] = like, whole if like is None else _region(saved.shape, like, rank)
    pieces = {index: [*planner.pieces(index, region)] for index, (_, region) in regions.items()}
    parts.expect((index, piece) for index, group in pieces.items() for piece in group)
    sharded: dict[int, torch.Tensor] = {}
    for index, target in targets.items():
        like, region = regions[index]
        shape, dtype = saved_tensors[index].shape, getattr(torch, saved_tensors[index].dtype)
        with torch.no_grad():
            own = target.to_local() if isinstance(target, DTensor) and ("s", index) in present.in_place else None
            fits = own is not None and can_take(own, dtype, region.size)
            local = own if own is not None and fits else torch.empty(region.size, dtype=dtype)
            for piece in pieces[index]:
                local[piece.region.within(region)] = parts.shard(index, piece)[piece.region.within(piece.shard)]
        sharded[index] = local if like is None else _divided(local, shape, like)
    return tensors, sharded


def _region(shape: tuple[int, ...], like: DTensor, rank: int) -> Region:
    """Return what this rank has of a tensor that is divided like another one; no elements if it is not in the mesh."""
    tensor = Sharded("", 0, shape, 0, tuple(map(_dimension, like.placements)))
    nothing = Region((0,) * len(shape), (0,) * len(shape))
    return region_of(tensor, _mesh_of(like.device_mesh), rank) or nothing


def _divided(local: torch.Tensor, shape: tuple[int, ...], like: DTensor) -> DTensor:
    return DTensor.from_local(
        local.to(like.to_local().device),
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=torch.empty(shape, device="meta").stride(),
    )
