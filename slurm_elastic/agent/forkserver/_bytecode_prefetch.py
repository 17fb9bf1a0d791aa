"""Reads modules before anybody imports them: what can be done of an import while it has to wait for libraries.

A third of the time that it takes to import torch goes into finding, checking, reading and unpacking the compiled files
of about a thousand modules, which needs none of its libraries. All of that is done by the import system itself
(`importlib.machinery.PathFinder` and `importlib.abc.InspectLoader.get_code`), only earlier; an import that comes later
gets what was found, and is as it would have been otherwise: the same spec and the same loader, without a trace.
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
    """A finder of modules (importlib.abc.MetaPathFinder) for what it has read; it is asked first until `close`."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[str, ModuleSpec]] = {}
        sys.meta_path.insert(0, self)

    def read(self, packages: Sequence[str], enough: Callable[[], bool]) -> None:
        """Read packages with their modules, but not the packages within them, until all are read or it is `enough`.

        Args:
            packages: what is not there is passed over.
            enough: asked before every module.
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
        """The modules that were read and not looked for since."""
        return [*self._found]

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the spec of a module that was read, in the directory that it is looked for in first."""
        directory, spec = self._found.pop(name, ("", None))
        return spec if path is not None and [*path][:1] == [directory] else None

    def close(self) -> None:
        """Leave the import system as it was."""
        sys.meta_path.remove(self)
        self._found.clear()

    def _read(self, name: str, directory: str) -> None:
        if name in sys.modules:
            return
        spec = PathFinder.find_spec(name, [directory])
        # Without a compiled file it would be compiled, which takes long, and may be for nothing.
        if spec is None or type(spec.loader) is not SourceFileLoader or not os.path.exists(spec.cached or ""):  # noqa: PTH110
            return
        try:
            code = spec.loader.get_code(name)
        except (ImportError, OSError, SyntaxError, ValueError):
            # To be told by its import, if there is one.
            return
        if code is not None:
            _have_ready(spec.loader, code)
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


def _have_ready(loader: SourceFileLoader, code: CodeType) -> None:
    """Let the next question for its code be answered at once; after that the loader is as any other."""

    def get_code(_name: str) -> CodeType:
        del vars(loader)["get_code"]
        return code

    vars(loader)["get_code"] = get_code
