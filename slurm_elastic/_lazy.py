"""Packages that import a part of themselves when somebody asks for a name of it, and not before (PEP 562)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["lazy"]


def lazy(package: str, parts: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a package.

    It lies on the way of every start of an agent and of a worker, so it needs nothing that is not there already. Type
    checkers see the names by an import under ``TYPE_CHECKING`` beside it.

    Args:
        package: its ``__name__``.
        parts: by public name, the module of the package that defines it.
    """

    def find(name: str) -> Any:
        """Import the module of a public name; others are no attributes."""
        if name not in parts:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        from importlib import import_module

        return getattr(import_module(f"{package}.{parts[name]}"), name)

    return find
