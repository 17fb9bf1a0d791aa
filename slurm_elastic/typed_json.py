"""JSON as values of declared types, in any thread."""

from __future__ import annotations

import threading
from typing import Any, TypeVar, overload

import msgspec

__all__ = ["convert", "decode"]

_T = TypeVar("_T")

_lock = threading.Lock()
_built: set[Any] = set()


@overload
def decode(content: bytes | str, kind: type[_T]) -> _T: ...


@overload
def decode(content: bytes | str, kind: Any) -> Any: ...


def decode(content: bytes | str, kind: Any) -> Any:
    """Return the value of this type that JSON describes.

    Args:
        content: JSON, in UTF-8 if it is bytes.
        kind: A type that msgspec knows: structs, dataclasses, unions, containers of these.

    Raises:
        msgspec.DecodeError: It is no JSON.
        msgspec.ValidationError: It does not describe a value of that type.
    """
    _build(kind)
    return msgspec.json.decode(content, type=kind)


@overload
def convert(value: object, kind: type[_T]) -> _T: ...


@overload
def convert(value: object, kind: Any) -> Any: ...


def convert(value: object, kind: Any) -> Any:
    """Return the value of this type that decoded JSON describes.

    Args:
        value: Decoded JSON.
        kind: See `decode`.

    Raises:
        msgspec.ValidationError: It does not describe a value of that type.
    """
    _build(kind)
    return msgspec.convert(value, kind)


def _build(kind: Any) -> None:
    """Have msgspec note the fields of a type, and of all types in it, in one thread.

    msgspec (0.22) does so at the first use of a type, and shows others what it has not finished: a second thread that
    uses the type meanwhile ends the process by SIGSEGV.
    """
    if kind not in _built:
        with _lock:
            msgspec.json.Decoder(kind)
            _built.add(kind)
