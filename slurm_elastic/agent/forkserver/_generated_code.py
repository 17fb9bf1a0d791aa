"""Keeps the code that the standard library's `dataclasses` generates, so that later starts do not compile it again.

For each class `dataclasses` writes the source of several methods and executes it (Lib/dataclasses.py, 3.10 to 3.14).
Torch, the agent and lightning 2.6 have 1,100 such classes, whose 6,000 sources take 0.15 s to compile. What a source is
compiled to depends on the release of Python alone. Each use gets objects of its own, as from the compiler.
"""

from __future__ import annotations

import builtins
import contextlib
import dataclasses
import hashlib
import marshal
import os
import sys
from collections.abc import Iterator
from types import CodeType
from typing import Any

from slurm_elastic.agent.forkserver._signed_file import UntrustedFileError, read_signed, write_signed

__all__ = ["GENERATED", "GeneratedCode"]

_LARGEST = 32 << 20
"""Bytes that are read of a file at most; one that grows beyond half of it is begun anew."""


class GeneratedCode:
    """The code of this process and, after `read`, of earlier ones."""

    def __init__(self) -> None:
        self._path = ""
        self._known: dict[str, bytes] = {}
        self._compiled: dict[str, CodeType] = {}

    def read(self, directory: str | None) -> None:
        """Read what earlier runs have kept; without a file that can be trusted there is nothing to read.

        Args:
            directory: The directory of the lists of imports; None to keep nothing.
        """
        if directory is None:
            return
        subject = f"{sys.version} {sys.flags.optimize}".encode()
        self._path = os.path.join(directory, f"generated-{hashlib.sha256(subject).hexdigest()[:32]}")  # noqa: PTH118
        with contextlib.suppress(UntrustedFileError, OSError):
            content = read_signed(self._path, _LARGEST)
            if content is not None:
                self._known = marshal.loads(content)

    def keep(self) -> None:
        """Write what this process has compiled, with what it has read, for later runs; nothing if all was read."""
        if not self._path or not self._compiled:
            return
        compiled = {source: marshal.dumps(code) for source, code in self._compiled.items()}
        self._compiled.clear()
        self._known |= compiled
        content = marshal.dumps(self._known)
        if len(content) > _LARGEST // 2:
            content = marshal.dumps(compiled)
        with contextlib.suppress(UntrustedFileError, OSError):
            write_signed(self._path, content)

    @contextlib.contextmanager
    def reused(self) -> Iterator[None]:
        """Let `dataclasses`, and no other module, use it during a with block."""
        namespace = vars(dataclasses)
        namespace["exec"] = self._execute
        try:
            yield
        finally:
            del namespace["exec"]

    def _execute(self, source: str, *scopes: Any) -> None:
        known = self._known.get(source)
        if known is not None:
            code = marshal.loads(known)
        else:
            code = compile(source, "<string>", "exec", dont_inherit=True)
            if self._path:
                self._compiled[source] = code
        builtins.exec(code, *scopes)


GENERATED = GeneratedCode()
"""That of this process and of those that it forks."""
