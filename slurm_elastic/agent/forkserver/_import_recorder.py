"""Records what a worker's script imports, in memory that the fork server reads.

The record has one line for each module that the script imports and that is not its own. It has none for what such a
module imports in turn, which is imported with it. A line before says what the script had changed by then, if that
differs from the line before. When a worker is killed its record is complete up to that moment.

CPython's import system asks `importlib._bootstrap._find_spec` for every module that is not in `sys.modules` (3.10 to
3.14), so a function in its place sees every import, and is on no stack while a module runs. `sys.meta_path` would show
a finder to the script, and an audit hook (sys.addaudithook) would be called for every `open`, `exec` and `id`.
"""

from __future__ import annotations

import _thread
import json
import mmap
import os
import struct
import sys
from collections.abc import Callable, Sequence
from typing import Any

_SIZE = 1 << 20
_LENGTH, _COUNT = struct.Struct("=Q"), struct.Struct("=Q")
_START = _LENGTH.size + _COUNT.size
_FIND_SPEC = "_find_spec"
_COMPARED_APART = ("environment", "seed")
_OWN_PACKAGE = "slurm_elastic"


class ImportRecord:
    """Memory of 1 MiB that a worker appends lines to, shared with the fork server. Lines beyond it are dropped."""

    def __init__(self) -> None:
        # The kernel allocates pages when they are first written.
        self._memory = mmap.mmap(-1, _SIZE)

    def append(self, line: str) -> None:
        """Add one line. The length is written last, so that a worker killed meanwhile leaves whole lines."""
        data = line.encode("utf-8", "surrogateescape") + b"\n"
        (length,) = _LENGTH.unpack_from(self._memory)
        end = _START + length
        if end + len(data) <= _SIZE:
            self._memory[end : end + len(data)] = data
            _LENGTH.pack_into(self._memory, 0, length + len(data))

    def __len__(self) -> int:
        """Return the number of bytes written so far."""
        length: int = _LENGTH.unpack_from(self._memory)[0]
        return length

    def count(self) -> None:
        """Count an imported module."""
        _COUNT.pack_into(self._memory, _LENGTH.size, self.modules() + 1)

    def modules(self) -> int:
        """Return the number of modules imported so far, with those that have no line."""
        number: int = _COUNT.unpack_from(self._memory, _LENGTH.size)[0]
        return number

    def text(self) -> str:
        """Return all lines written so far."""
        return self._memory[_START : _START + len(self)].decode("utf-8", "surrogateescape")

    def close(self) -> None:
        """Unmap the memory."""
        self._memory.close()


def is_own_file(path: str, directories: Sequence[str]) -> bool:
    """Return whether a file is the script's own: in one of these directories, and not in an installed package."""
    return any(path.startswith(directory + os.sep) for directory in directories) and not (
        f"{os.sep}site-packages{os.sep}" in path or f"{os.sep}dist-packages{os.sep}" in path
    )


def observe(record: ImportRecord, directories: Sequence[str]) -> None:
    """Record the imports of this process from now on; processes that it forks record nothing.

    Args:
        record: The memory for the lines: ``O file`` for a module of the script's own, ``S json`` for a changed state,
            ``I module <tab> file <tab> line <tab> function`` for an import, with the place in the script's own files.
        directories: The entries that Python puts in front of sys.path for the script.
    """
    bootstrap = sys.modules["_frozen_importlib"]
    find: Callable[..., Any] = getattr(bootstrap, _FIND_SPEC)
    before = current_state([*directories, *sys.path])
    last = before
    me = os.getpid()
    importing: dict[int, list[Any]] = {}

    def note(name: str, spec: Any) -> None:
        nonlocal last
        origin = spec.origin
        # An encoding is a small table, which Python imports when a text first needs it.
        if os.getpid() != me or name.startswith("encodings."):
            return
        record.count()
        if origin in ("built-in", "frozen"):
            return
        if isinstance(origin, str) and is_own_file(origin, directories):
            record.append(f"O {origin}")
            return
        stack = importing.setdefault(_thread.get_ident(), [])
        # importlib sets this attribute while a module's code runs (importlib._bootstrap, _load_unlocked).
        while stack and not stack[-1]._initializing:
            stack.pop()
        if not stack and name.partition(".")[0] != _OWN_PACKAGE:
            state = current_state(sys.path)
            if state != last:
                record.append(f"S {json.dumps(_difference(before, state), sort_keys=True)}")
                last = state
            record.append("\t".join((f"I {name}", *_place(directories))))
        stack.append(spec)

    def find_spec(name: str, path: Any, target: Any = None) -> Any:
        spec = find(name, path, target)
        if spec is not None and target is None:
            try:
                note(name, spec)
            except Exception:
                # The import must not fail because it cannot be recorded: that only makes a later start slower.
                return spec
        return spec

    # Python leaves frames of this file out of tracebacks (Python/import.c, remove_importlib_frames, 3.11).
    find_spec.__code__ = find_spec.__code__.replace(co_filename=find.__code__.co_filename, co_name=_FIND_SPEC)
    find_spec.__name__ = find_spec.__qualname__ = _FIND_SPEC
    find_spec.__module__ = bootstrap.__name__
    setattr(bootstrap, _FIND_SPEC, find_spec)


def current_state(path: Sequence[str]) -> dict[str, Any]:
    """Return the state that a module may depend on when it is imported: environment, sys.path, torch's defaults."""
    state: dict[str, Any] = {
        "environment": dict(os.environ),
        "path": [entry for entry in path if entry],
        "directory": os.getcwd(),  # noqa: PTH109
    }
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        state["seed"] = torch.initial_seed()
        state["dtype"] = str(torch.get_default_dtype())
        state["torch"] = [
            torch.is_grad_enabled(),
            torch.are_deterministic_algorithms_enabled(),
            str(getattr(getattr(torch, "_GLOBAL_DEVICE_CONTEXT", None), "device_context", None) is not None),
        ]
    return state


def _difference(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    difference = {name: now[name] for name in now if name not in _COMPARED_APART and now[name] != before.get(name)}
    if now.get("seed") != before.get("seed"):
        # Ranks may have different ones.
        difference["seeded"] = True
    names = {*before["environment"], *now["environment"]}
    environment = {
        name: now["environment"].get(name)
        for name in names
        if before["environment"].get(name) != now["environment"].get(name)
    }
    return {**difference, "environment": environment} if environment else difference


def _place(directories: Sequence[str]) -> tuple[str, str, str]:
    """Return file, line and function of the innermost frame in the script's own files."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        file = os.path.abspath(code.co_filename)  # noqa: PTH100
        # Frozen modules and compiled strings have no file: "<frozen importlib._bootstrap>".
        if not code.co_filename.startswith("<") and is_own_file(file, directories):
            return file, str(frame.f_lineno), code.co_name
        frame = frame.f_back
    return "", "0", "<module>"
