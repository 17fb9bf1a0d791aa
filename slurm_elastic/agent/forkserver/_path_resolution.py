"""Lets the standard library's `inspect` resolve each directory once while modules are imported.

torch asks `inspect` where its operators are registered, about 350 times during its import (torch/_library/utils.py,
get_source, 2.13). `inspect.getmodule` then resolves the file names of all modules that were imported since (inspect.py,
3.11), which is one lstat(2) for each directory above each of a thousand files: two fifths of all calls to a file system
during an import of torch.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Iterator
from types import SimpleNamespace

__all__ = ["directories_resolved_once"]


@contextlib.contextmanager
def directories_resolved_once() -> Iterator[None]:
    """Let `inspect`, and no other module, assume that directories do not become symbolic links, or other ones."""
    resolved = functools.cache(os.path.realpath)

    def realpath(path: str) -> str:
        directory, name = os.path.split(path)
        if not os.path.isabs(path) or name in ("", ".", "..") or os.path.islink(path):  # noqa: PTH114, PTH117
            return os.path.realpath(path)
        return os.path.join(resolved(directory), name)  # noqa: PTH118

    namespace = vars(inspect)
    kept = namespace["os"]
    namespace["os"] = SimpleNamespace(
        **{**vars(os), "path": SimpleNamespace(**{**vars(os.path), "realpath": realpath})}
    )
    try:
        yield
    finally:
        namespace["os"] = kept
