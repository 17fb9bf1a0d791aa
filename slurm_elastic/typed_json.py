"""JSON from files, sockets and other programs: every parser of it in the agents reads it by this module.

Whatever the bytes are, its functions return a value or raise `JSONError`, and nothing else. Any thread may call them.
"""

from __future__ import annotations

import json
import threading
from typing import Any, TypeVar, overload

_T = TypeVar("_T")

_lock = threading.Lock()
_built: set[Any] = set()


class JSONError(ValueError):
    """Raised for what is no JSON in UTF-8, or does not describe a value of the wanted type."""


def loads(content: bytes | str) -> Any:
    """Return the value of any type that JSON describes; it may have surrogates, for bytes of a path (PEP 383).

    Args:
        content: JSON, in UTF-8 if it is bytes.

    Raises:
        JSONError: It is no JSON, or is nested too deeply, or has a number of too many digits.
    """
    try:
        return json.loads(content if isinstance(content, str) else content.decode())
    except (ValueError, RecursionError) as error:
        raise JSONError(str(error)) from None


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
        JSONError: It is no JSON, or describes no value of that type.
    """
    # Its import takes 60 ms, for which a command that only reads records would wait.
    import msgspec

    _build(kind)
    try:
        return msgspec.json.decode(content, type=kind)
    except (ValueError, RecursionError) as error:
        # Its own errors, and such of Python as UnicodeDecodeError (msgspec 0.22).
        raise JSONError(str(error)) from None


@overload
def convert(value: object, kind: type[_T]) -> _T: ...


@overload
def convert(value: object, kind: Any) -> Any: ...


def convert(value: object, kind: Any) -> Any:
    """Return the value of this type, see `decode`, that decoded JSON describes.

    Raises:
        JSONError: It describes no value of that type.
    """
    import msgspec

    _build(kind)
    try:
        return msgspec.convert(value, kind)
    except (ValueError, RecursionError) as error:
        raise JSONError(str(error)) from None


def _build(kind: Any) -> None:
    """Have msgspec note the fields of a type, and of all types in it, in one thread.

    msgspec (0.22) does so at the first use of a type, and shows others what it has not finished: a second thread that
    uses the type meanwhile ends the process by SIGSEGV.
    """
    import msgspec

    if kind not in _built:
        with _lock:
            msgspec.json.Decoder(kind)
            _built.add(kind)
