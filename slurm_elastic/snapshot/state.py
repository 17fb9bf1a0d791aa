"""Training state as tensors and a description, and back. The description is JSON; nothing is unpickled.

Containers in the description are objects with one key: ``d`` for a dict as a list of keys and values, ``l`` for a list,
``t`` for a tuple, ``x`` for the index of a tensor, ``s`` for that of a sharded tensor, ``b`` for bytes. None, booleans,
whole numbers, floats and strings stand for themselves.
"""

from __future__ import annotations

import base64
import json
import math
import pickle
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from slurm_elastic import typed_json
from slurm_elastic.snapshot.memory import HEADER, Contents, Slot
from slurm_elastic.snapshot.sharding import Layout, round_up

if TYPE_CHECKING:
    import torch
    from torch.distributed.tensor import DTensor

PER_RANK = "per_rank"
"""Name of what ranks have of their own, in `save` and `load`, and on disk."""
_SCALARS = (bool, int, float, str, type(None))
_EXACT_SCALARS = frozenset(_SCALARS)
_encode = json.JSONEncoder(separators=(",", ":")).encode


class StateError(TypeError):
    """The state has something that a snapshot cannot hold."""


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """The place of a contiguous tensor in a slot: offset, from the first tensor, and size in bytes."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class Table:
    """The places of all tensors, by index, their bytes, and the places as JSON.

    Attributes:
        size: Bytes of all tensors.
    """

    places: tuple[TensorPlace, ...]
    size: int
    text: str


ByIndex: TypeAlias = "Sequence[torch.Tensor] | Mapping[int, torch.Tensor]"
"""Tensors, or those of them that are wanted."""


class Flat(NamedTuple):
    """A state with an index in the place of each tensor, its tensors, and its sharded tensors."""

    tree: Any
    tensors: list[torch.Tensor]
    sharded: list[DTensor]


def is_stateful(value: Any) -> bool:
    """Return whether this is an object with `state_dict` and `load_state_dict`, and no plain value."""
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def state_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the present state of these values, by name."""
    return {name: value.state_dict() if is_stateful(value) else value for name, value in values.items()}


def flatten(state: Mapping[str, Any]) -> Flat:
    """Take a state apart; raises StateError if a snapshot cannot hold it."""
    # A process that has tensors has imported torch.
    loaded = sys.modules.get("torch")
    # A process that has DTensors has imported their module.
    distributed = sys.modules.get("torch.distributed.tensor")
    tensors: list[torch.Tensor] = []
    sharded: list[DTensor] = []
    strided = None if loaded is None else loaded.strided
    plain_tensors = () if loaded is None else (loaded.Tensor, loaded.nn.Parameter)
    size = None if loaded is None else loaded.Size

    def tensor(value: torch.Tensor) -> dict[str, int]:
        if value.layout is not strided or value.is_quantized:
            raise _UnsupportedError(value)
        tensors.append(value)
        return {"x": len(tensors) - 1}

    # This runs at every step, so exact types are compared first, and paths are made for errors only.
    def node(value: Any) -> Any:
        kind = type(value)
        if kind in _EXACT_SCALARS:
            return value
        if kind in plain_tensors:
            return tensor(value)
        if isinstance(value, dict):
            return {
                "d": [
                    [
                        key if type(key) in _EXACT_SCALARS else node(key),
                        item if type(item) in _EXACT_SCALARS else node(item),
                    ]
                    for key, item in value.items()
                ]
            }
        if kind is list:
            return {"l": [item if type(item) in _EXACT_SCALARS else node(item) for item in value]}
        if kind is tuple or kind is size:
            return {"t": [item if type(item) in _EXACT_SCALARS else node(item) for item in value]}
        if isinstance(value, _SCALARS):
            return value
        if isinstance(value, bytes):
            return {"b": base64.b64encode(value).decode()}
        if distributed is not None and isinstance(value, distributed.DTensor):
            sharded.append(value)
            return {"s": len(sharded) - 1}
        if loaded is not None and isinstance(value, loaded.Tensor):
            return tensor(value)
        raise _UnsupportedError(value)

    try:
        tree = {name: node(value) for name, value in state.items()}
    except _UnsupportedError as error:
        path = next(keys for value, keys in _values_in(state) if value is error.value)
        raise StateError(f"{'.'.join(map(str, path))} is {_refusal(error.value)}") from None
    return Flat(tree, tensors, sharded)


class _UnsupportedError(Exception):
    """A snapshot cannot hold this value, a part of the state."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _refusal(value: Any) -> str:
    import torch

    if isinstance(value, torch.Tensor):
        return f"a {value.layout} tensor; a snapshot holds dense tensors: use to_dense()"
    return (
        f"a {type(value).__name__}; a snapshot holds tensors, numbers, strings, bytes, and dicts, lists and tuples of"
        " them"
    )


def _values_in(value: Any, path: tuple[object, ...] = ()) -> Iterator[tuple[Any, tuple[object, ...]]]:
    """Yield all parts of a state with the keys that lead to them; for a part of a key, those that lead to its dict."""
    yield value, path
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _values_in(key, path)
            yield from _values_in(item, (*path, key))
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _values_in(item, (*path, index))


def table_of(tensors: Sequence[torch.Tensor]) -> Table:
    """Return the places of these tensors in a slot, one after the other."""
    places, offset = [], 0
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        places.append(TensorPlace(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), offset, size))
        offset = round_up(offset + size)
    text = _encode([[place.dtype, place.shape, place.offset] for place in places])
    return Table(tuple(places), offset, text)


class Describer:
    """Describes the successive states of a worker, and encodes only what has changed."""

    def __init__(self) -> None:
        self._encoded: dict[str, tuple[bytes, str]] = {}
        """By name of a state: the bytes of its tree, and name and tree as JSON."""

    def describe(self, tree: Mapping[str, Any], table: Table, layout: bytes = b"null") -> bytes:
        """Return the description of a state; `layout` is that of its sharded tensors, as JSON."""
        state = ",".join([self._json(name, part) for name, part in tree.items()])
        return b'{"tensors":%s,"state":{%s},"layout":%s}' % (table.text.encode(), state.encode(), layout)

    def _json(self, name: str, tree: Any) -> str:
        # Trees of the same bytes have the same JSON, in a sixth of the time. Equality would not do: 1, 1.0 and True are
        # equal, and so are 0.0 and -0.0. Nothing reads these bytes.
        content = pickle.dumps(tree, 5)
        before, text = self._encoded.get(name, (None, ""))
        if content != before:
            text = f"{_encode(name)}:{_encode(tree)}"
            self._encoded[name] = content, text
        return text


def read_description(description: bytes, tensors: memoryview) -> tuple[Any, list[torch.Tensor]]:
    """Return the state of a slot with an index in the place of each tensor, and the tensors in this memory.

    Raises ValueError if the description does not fit.
    """
    content = typed_json.loads(description)
    views = [tensor_in(tensors, name, shape, offset) for name, shape, offset in content["tensors"]]
    return content["state"], views


def read_slot(slot: Slot, contents: Contents) -> tuple[Any, list[torch.Tensor], Layout | None]:
    """Return the state of a slot, see `read_description`, and its layout; of a part, the state of the rank's own.

    The tensors are in the memory of the slot. Raises ValueError if the description does not fit.
    """
    body = slot.memory()[HEADER + contents.shards : contents.size]
    size = contents.tensors - contents.shards
    description = bytes(body[size:])
    return *read_description(description, body[:size]), read_layout(description)


def read_layout(description: bytes) -> Layout | None:
    """Return the layout in a description; None if all ranks have the whole state. Raises ValueError for none."""
    # Not by msgspec: JSON here has NaN.
    content = typed_json.loads(description)
    if not isinstance(content, dict) or "layout" not in content:
        raise ValueError("no description of a snapshot")
    return typed_json.convert(content["layout"], Layout | None)


def places_in(tree: Mapping[str, Any]) -> Iterator[tuple[str, int, tuple[Any, ...], bool]]:
    """Yield kind, x or s, and index of each tensor of a state, and the keys that lead to it.

    The last value is false for one in a tuple, or under a key that is no plain value: torch's checkpoints have no names
    for these.
    """

    def walk(node: Any, path: tuple[Any, ...], has_name: bool) -> Iterator[tuple[str, int, tuple[Any, ...], bool]]:
        if not isinstance(node, dict):
            return
        ((kind, content),) = node.items()
        if kind in "xs":
            yield kind, content, path, has_name
        elif kind == "d":
            for key, item in content:
                yield from walk(item, (*path, key), has_name and not isinstance(key, dict))
        elif kind in "lt":
            for index, item in enumerate(content):
                yield from walk(item, (*path, index), has_name and kind == "l")

    for name, node in tree.items():
        yield from walk(node, (name,), True)


def _value_at(value: Any, path: Iterable[Any]) -> Any:
    """Return the part of a state to which keys lead; None if there is none."""
    for key in path:
        if isinstance(value, Mapping):
            value = None if isinstance(key, dict) else value.get(key)
        else:
            is_there = isinstance(value, (list, tuple)) and isinstance(key, int) and key < len(value)
            value = value[key] if is_there else None
    return value


def tensor_in(memory: memoryview, name: str, shape: Sequence[int], offset: int) -> torch.Tensor:
    """Return the contiguous tensor of a type, such as ``float32``, at an offset in bytes in this memory.

    Raises ValueError if the memory does not have it.
    """
    import torch

    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name} is no type of tensors")
    count = math.prod(shape)
    size = count * dtype.itemsize
    if not 0 <= offset <= offset + size <= len(memory):
        raise ValueError(f"a tensor of {size} bytes at {offset} in {len(memory)} bytes")
    if not size:
        return torch.empty(tuple(shape), dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).view(tuple(shape))


class PresentTensors:
    """The tensors of the present state in the places of those of a snapshot.

    Args:
        tree: The state of the snapshot, as `flatten` returns it.
        present: The present state.
        in_place: Names of what may be overwritten before it is loaded: its `load_state_dict` copies tensors into those
            that its `state_dict` has shown, and would copy a copy.
    """

    def __init__(self, tree: Mapping[str, Any], present: Mapping[str, Any], in_place: Collection[str] = ()) -> None:
        self.found: dict[tuple[str, int], torch.Tensor | None] = {}
        """By kind, x or s, and index, for each tensor of what the present state has: others are left where they are.
        None if the present state has no tensor in that place yet."""
        self.in_place: set[tuple[str, int]] = set()
        """Those of them that may be overwritten."""
        # A process that has tensors has imported torch.
        loaded = sys.modules.get("torch")
        for kind, index, path, _ in places_in({name: node for name, node in tree.items() if name in present}):
            value = _value_at(present, path)
            is_tensor = loaded is not None and isinstance(value, loaded.Tensor)
            self.found[kind, index] = value if is_tensor else None
            if is_tensor and path[0] in in_place:
                self.in_place.add((kind, index))

    def copied(self, index: int, view: torch.Tensor) -> torch.Tensor:
        """Return a copy of a tensor of the snapshot, in the present one if that may be overwritten."""
        import torch

        target = self.found["x", index]
        if target is None or ("x", index) not in self.in_place or not can_take(target, view.dtype, tuple(view.shape)):
            return view.clone()
        with torch.no_grad():
            return target.copy_(view)


def can_take(target: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> bool:
    """Return whether a tensor can be overwritten with elements of this type in this shape."""
    import torch

    plain = type(target) in (torch.Tensor, torch.nn.Parameter) and target.layout is torch.strided
    same = target.dtype == dtype and tuple(target.shape) == shape
    return plain and same and target.is_contiguous() and not target.is_meta and not target.is_inference()


def rebuild(tree: Any, tensors: ByIndex, sharded: ByIndex = ()) -> dict[str, Any]:
    """Return a state from one of `flatten`, with these tensors, and what takes the places of sharded ones, by index."""

    def value(node: Any) -> Any:
        if not isinstance(node, dict):
            return node
        ((kind, content),) = node.items()
        if kind == "x":
            return tensors[content]
        if kind == "s":
            return sharded[content]
        if kind == "d":
            return {value(key): value(item) for key, item in content}
        if kind == "b":
            return base64.b64decode(content)
        each_value = [value(item) for item in content]
        return tuple(each_value) if kind == "t" else each_value

    return {name: value(node) for name, node in tree.items()}
