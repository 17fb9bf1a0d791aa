"""Finds and reads the compiled files of modules before they are imported, while torch's libraries are loaded.

A third of the time that it takes to import torch goes into finding, checking, reading and unpacking the compiled files
of about a thousand modules, which needs none of its libraries. The import system itself does that here, only earlier
(`importlib.machinery.PathFinder` and `importlib.abc.InspectLoader.get_code`); a later import uses the result, with the
same spec and the same loader as without.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType

__all__ = ["ReadAhead"]


class ReadAhead:
    """A finder of modules (importlib.abc.MetaPathFinder) that gives the modules that it has read, until `close`."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[str, ModuleSpec]] = {}
        sys.meta_path.insert(0, self)

    def read(self, packages: Sequence[str], enough: Callable[[], bool]) -> None:
        """Read packages with their modules, but not the packages within them, until all are read or it is `enough`.

        Args:
            packages: The packages, in this order; those that are not installed are skipped.
            enough: Called before every module; reading ends when it returns True.
        """
        for package in packages:
            parent, directory = _directories(package)
            for file in _files(directory):
                if enough():
                    return
                if file == "__init__.py" and parent is not None:
                    self._read(package, parent)
                elif file.endswith(".py") and file != "__init__.py":
                    self._read(f"{package}.{file[:-3]}", directory)

    @property
    def names(self) -> list[str]:
        """The modules that were read and not imported since."""
        return [*self._found]

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the spec of a module that was read, if the import looks first in the directory that it is from."""
        directory, spec = self._found.pop(name, ("", None))
        return spec if path is not None and [*path][:1] == [directory] else None

    def close(self) -> None:
        """Remove this finder from the import system."""
        sys.meta_path.remove(self)
        self._found.clear()

    def _read(self, name: str, directory: str) -> None:
        if name in sys.modules:
            return
        spec = PathFinder.find_spec(name, [directory])
        # Without a compiled file the source would be compiled, which takes long, and the module may not be imported.
        if spec is None or type(spec.loader) is not SourceFileLoader or not os.path.exists(spec.cached or ""):  # noqa: PTH110
            return
        try:
            code = spec.loader.get_code(name)
        except (ImportError, OSError, SyntaxError, ValueError):
            # The import raises the error, if there is one.
            return
        if code is not None:
            _preset_code(spec.loader, code)
            self._found[name] = directory, spec


def _directories(package: str) -> tuple[str | None, str]:
    """Find a package without importing it: the directory of its parent, if it has one, and its own."""
    top, *names = package.split(".")
    found = importlib.util.find_spec(top)
    start = [*(found.submodule_search_locations or [])] if found is not None else []
    if not start:
        return None, ""
    parent = os.path.join(start[0], *names[:-1]) if names else None  # noqa: PTH118
    return parent, os.path.join(start[0], *names)  # noqa: PTH118


def _files(directory: str) -> list[str]:
    try:
        return os.listdir(directory) if directory else []  # noqa: PTH208
    except OSError:
        return []


def _preset_code(loader: SourceFileLoader, code: CodeType) -> None:
    """Let the loader return this code at its next `get_code`, and load as usual after that."""

    def get_code(_name: str) -> CodeType:
        del vars(loader)["get_code"]
        return code

    vars(loader)["get_code"] = get_code
