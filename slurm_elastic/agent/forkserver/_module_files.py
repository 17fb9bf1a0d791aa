"""Lets the standard library's `inspect` find the module of a file without a look at all modules.

torch asks `inspect` where its operators are registered, about 130 times during its import and that of torch._dynamo
(torch/_library/utils.py, get_source, 2.13). For a file that it does not know yet, `inspect.getmodule` looks at all
modules, and resolves the file names of those that were imported since it did so last (inspect.py, 3.11), which is one
lstat(2) for each directory above each of thousands of files.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import sys
from collections.abc import Iterator
from types import ModuleType

__all__ = ["modules_found_by_file"]

_NAME = "modulesbyfile"


class _ModulesByFile(dict[str, str]):
    """The name of each imported module, by its source file; it reads new entries of `sys.modules` when it is asked."""

    _read = 0

    def __contains__(self, file: object) -> bool:
        if super().__contains__(file):
            return True
        # Where modules were removed in between, some are passed over: `inspect` then finds them as before.
        new = list(itertools.islice(sys.modules.values(), self._read, None))
        self._read += len(new)
        for module in new:
            names = vars(module) if isinstance(module, ModuleType) else {}
            path, name = names.get("__file__"), names.get("__name__")
            if isinstance(path, str) and isinstance(name, str):
                self[path] = name
        return super().__contains__(file)


@contextlib.contextmanager
def modules_found_by_file() -> Iterator[None]:
    """Let `inspect` know the files of modules, also of those that are imported meanwhile."""
    namespace = vars(inspect)
    kept = namespace[_NAME]
    namespace[_NAME] = _ModulesByFile(kept)
    try:
        yield
    finally:
        kept.update(namespace[_NAME])
        namespace[_NAME] = kept
