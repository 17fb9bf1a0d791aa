"""Training state as tensors and a description, and back. The description is JSON; nothing is unpickled.

Containers in the description are objects with one key: ``d`` for a dict as a list of keys and values, ``l`` for a list,
``t`` for a tuple, ``x`` for the index of a tensor, ``b`` for bytes. None, booleans, whole numbers, floats and strings
stand for themselves.
"""

from __future__ import annotations

import base64
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slurm_elastic.snapshot.slots import round_up

if TYPE_CHECKING:
    import torch

__all__ = [
    "StateError",
    "Table",
    "TensorPlace",
    "describe",
    "flatten",
    "read_description",
    "rebuild",
    "table_of",
    "unflatten",
]

_SCALARS = (bool, int, float, str, type(None))
_encode = json.JSONEncoder(separators=(",", ":")).encode


class StateError(TypeError):
    """The state has something that a snapshot cannot hold."""


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """The place of a tensor in a slot.

    Attributes:
        dtype: Name of its type, such as ``float32``.
        shape: Its shape; it is contiguous.
        offset: In bytes, from the first tensor.
        size: In bytes.
    """

    dtype: str
    shape: tuple[int, ...]
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class Table:
    """The places of all tensors.

    Attributes:
        places: By index.
        size: Bytes of all tensors.
        text: The table as JSON.
    """

    places: tuple[TensorPlace, ...]
    size: int
    text: str


def flatten(state: Mapping[str, Any]) -> tuple[Any, list[torch.Tensor]]:
    """Return the state with an index in the place of each tensor, and the tensors.

    Raises:
        StateError: The state has something that a snapshot cannot hold.
    """
    # A process that has tensors has imported torch.
    loaded = sys.modules.get("torch")
    tensors: list[torch.Tensor] = []

    def node(value: Any, path: tuple[object, ...]) -> Any:
        if loaded is not None and isinstance(value, loaded.Tensor):
            _check_tensor(value, path)
            tensors.append(value)
            return {"x": len(tensors) - 1}
        if isinstance(value, _SCALARS):
            return value
        if isinstance(value, dict):
            return {"d": [[node(key, path), node(each, (*path, key))] for key, each in value.items()]}
        if type(value) is list:
            return {"l": [node(each, (*path, index)) for index, each in enumerate(value)]}
        if type(value) is tuple or (loaded is not None and isinstance(value, loaded.Size)):
            return {"t": [node(each, (*path, index)) for index, each in enumerate(value)]}
        if isinstance(value, bytes):
            return {"b": base64.b64encode(value).decode()}
        raise StateError(
            f"{_shown(path)} is a {type(value).__name__}; a snapshot holds tensors, numbers, strings, bytes,"
            " and dicts, lists and tuples of them"
        )

    return {name: node(value, (name,)) for name, value in state.items()}, tensors


def _shown(path: tuple[object, ...]) -> str:
    return ".".join(map(str, path))


def _check_tensor(tensor: torch.Tensor, path: tuple[object, ...]) -> None:
    import torch

    # A process that has DTensors has imported their module.
    distributed = sys.modules.get("torch.distributed.tensor")
    if distributed is not None and isinstance(tensor, distributed.DTensor):
        raise StateError(
            f"{_shown(path)} is a DTensor; a snapshot holds state that every rank has as a whole: save sharded state by"
            " torch.distributed.checkpoint"
        )
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise StateError(f"{_shown(path)} is a {tensor.layout} tensor; a snapshot holds dense tensors: use to_dense()")


def table_of(tensors: Sequence[torch.Tensor]) -> Table:
    """Return the places of these tensors in a slot, one after the other."""
    places, offset = [], 0
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        places.append(TensorPlace(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), offset, size))
        offset = round_up(offset + size)
    text = _encode([[place.dtype, place.shape, place.offset] for place in places])
    return Table(tuple(places), offset, text)


def describe(tree: Any, table: Table) -> bytes:
    """Return the description of a state."""
    return b'{"tensors":%s,"state":%s}' % (table.text.encode(), _encode(tree).encode())


def unflatten(description: bytes, tensors: memoryview) -> dict[str, Any]:
    """Return the state of a slot, in memory of its own.

    Args:
        description: Of the state.
        tensors: The memory of the tensors.

    Raises:
        ValueError: The description does not fit the memory.
    """
    tree, views = read_description(description, tensors)
    return rebuild(tree, [view.clone() for view in views])


def read_description(description: bytes, tensors: memoryview) -> tuple[Any, list[torch.Tensor]]:
    """Return the state of a slot with an index in the place of each tensor, and the tensors in the memory of the slot.

    Args:
        description: Of the state.
        tensors: The memory of the tensors.

    Raises:
        ValueError: The description does not fit the memory.
    """
    content = json.loads(description)
    views = []
    if content["tensors"]:
        import torch
    for name, shape, offset in content["tensors"]:
        dtype = getattr(torch, name)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{name} is no type of tensors")
        count = math.prod(shape)
        size = count * dtype.itemsize
        if not 0 <= offset <= offset + size <= len(tensors):
            raise ValueError(f"a tensor of {size} bytes at {offset} in {len(tensors)} bytes")
        if size:
            view = torch.frombuffer(tensors, dtype=dtype, count=count, offset=offset).view(shape)
        else:
            view = torch.empty(shape, dtype=dtype)
        views.append(view)
    return content["state"], views


def rebuild(tree: Any, tensors: Sequence[torch.Tensor]) -> dict[str, Any]:
    """Return a state from one that has an index in the place of each tensor.

    Args:
        tree: The state, as `flatten` returns it.
        tensors: By index.
    """

    def value(node: Any) -> Any:
        if not isinstance(node, dict):
            return node
        ((kind, content),) = node.items()
        if kind == "x":
            return tensors[content]
        if kind == "d":
            return {value(key): value(each) for key, each in content}
        if kind == "b":
            return base64.b64decode(content)
        each_value = [value(each) for each in content]
        return tuple(each_value) if kind == "t" else each_value

    return {name: value(node) for name, node in tree.items()}
