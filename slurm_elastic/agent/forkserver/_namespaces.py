"""Reads modules and types of objects without running code of these objects.

`isinstance` asks an object of another type for its ``__class__``, and `vars` asks a module for its ``__dict__``:
a lazy proxy imports something then. All modules of this package that look at a script's objects use these functions.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

_NAMESPACE: Any = vars(ModuleType)["__dict__"]


def has_type(value: object, types: tuple[type, ...]) -> bool:
    """Return whether the type of a value is one of these or derived from one.

    Args:
        value: Any object; none of its attributes is read.
        types: Classes without a metaclass of their own.
    """
    return issubclass(type(value), types)


def namespace_of(module: object) -> dict[str, Any] | None:
    """Return the namespace of a module; None for another object, which may be in `sys.modules`, too."""
    if not has_type(module, (ModuleType,)):
        return None
    namespace: dict[str, Any] = _NAMESPACE.__get__(module)
    return namespace
