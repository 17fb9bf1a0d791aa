"""Packages whose modules are imported on the first use of one of their names (PEP 562)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def lazy(package: str, parts: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a package.

    Every start of an agent and of a worker executes this, so it imports nothing that Python has not imported already.
    An import under ``TYPE_CHECKING`` beside it shows the names to type checkers.

    Args:
        package: The package's ``__name__``.
        parts: The module of the package that defines a public name, by that name; empty if the name is the module.
    """

    def find(name: str) -> Any:
        """Import the module of a public name and return what the name stands for."""
        if name not in parts:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        from importlib import import_module

        if not parts[name]:
            return import_module(f"{package}.{name}")
        return getattr(import_module(f"{package}.{parts[name]}"), name)

    return find
