"""Records in a worker what it imports, in memory that the fork server reads.

The record has the name of each module, in order of first import, and says which came after a seed was set. A script
that changes its environment, working directory or sys.path ends it before its next import; what an installed package
changes does not end it. The record of a killed worker is complete up to that moment.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import struct
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from slurm_elastic.agent.forkserver._script_objects import namespace_of

_SIZE = 1 << 20
_LENGTH = struct.Struct("=Q")
_ENDED = "!"
"""Begins the line that says why a record has ended."""
_SEEDED = "~"
"""Begins the name of a module that was imported after a seed was set."""
_STANDARD_LIBRARY = os.path.dirname(os.__file__) + os.sep  # noqa: PTH120
_OURS = os.path.abspath(os.path.join(os.path.dirname(__file__), *[os.pardir] * 2)) + os.sep  # noqa: PTH100, PTH118, PTH120


class ImportRecord:
    """Memory of 1 MiB that a worker appends lines to, shared with the fork server. Lines beyond it are dropped.

    A line is the name of a module, or the path of a file of the script's own that was imported.
    """

    def __init__(self) -> None:
        # The kernel allocates pages when they are first written.
        self._memory = mmap.mmap(-1, _SIZE)

    def append(self, line: str) -> None:
        """Add one line. The length is written last, so that a worker killed meanwhile leaves whole lines."""
        data = line.encode("utf-8", "surrogatepass") + b"\n"
        start = _LENGTH.size + len(self)
        if start + len(data) <= _SIZE:
            self._memory[start : start + len(data)] = data
            _LENGTH.pack_into(self._memory, 0, len(self) + len(data))

    def end(self, reason: str) -> None:
        """Add the line that says why no more is recorded, for people."""
        self.append(_ENDED + reason)

    def __len__(self) -> int:
        """Return the number of bytes written so far."""
        length: int = _LENGTH.unpack_from(self._memory)[0]
        return length

    def lines(self) -> list[str]:
        """Return the names of modules and the files written so far."""
        return [line.removeprefix(_SEEDED) for line in self._text() if not line.startswith(_ENDED)]

    def seeded(self) -> list[str]:
        """Return the modules whose random numbers may come from a seed of the script's."""
        return [line.removeprefix(_SEEDED) for line in self._text() if line.startswith(_SEEDED)]

    def end_reason(self) -> str:
        """Return why no more is recorded, for people; empty if that is not so."""
        return next((line[len(_ENDED) :] for line in self._text() if line.startswith(_ENDED)), "")

    def _text(self) -> list[str]:
        return bytes(self._memory[_LENGTH.size : _LENGTH.size + len(self)]).decode("utf-8", "replace").splitlines()

    def close(self) -> None:
        """Unmap the memory."""
        self._memory.close()


def is_installed(path: str) -> bool:
    """Return whether a file belongs to an installed package."""
    return f"{os.sep}site-packages{os.sep}" in path or f"{os.sep}dist-packages{os.sep}" in path


def is_own_file(path: str, directories: Sequence[str]) -> bool:
    """Return whether a file is the script's own: in one of these directories, and not in an installed package."""
    return any(path.startswith(directory + os.sep) for directory in directories) and not is_installed(path)


def observe(record: ImportRecord, directories: Sequence[str]) -> None:
    """Record the imports of this process from now on; processes that it forks record nothing.

    Draws a number from `random` and from numpy, whose seeds have to be of the system.

    Args:
        record: The memory for them.
        directories: The entries that Python puts in front of sys.path for the script.
    """
    listen(_Recorder(record, directories))


class _Recorder:
    def __init__(self, record: ImportRecord, directories: Sequence[str]) -> None:
        self._record, self._directories = record, directories
        self._process = os.getpid()
        self._path = [entry for entry in (*directories, *sys.path) if entry]
        self._environment: dict[bytes, bytes | None] = {**os.environb}
        self._changes: dict[bytes, None] = {}
        """What the script has changed: variables, and the working directory, for people."""
        self._seen = {*sys.modules}
        torch: Any = sys.modules.get("torch")
        self._torch = (torch.get_default_dtype, torch.are_deterministic_algorithms_enabled) if torch else ()
        self._torch_state = self._state_of_torch()
        self._mark, self._seeds = "", _seeds()
        self._unseeded = [value() for value in self._seeds]

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "import":
            if os.getpid() == self._process:
                self._imports(arguments[0], arguments[2])
        elif event in ("os.putenv", "os.unsetenv"):
            self._note_variable(*arguments)
        elif event == "os.chdir" and _caller() is not None:
            self._changes[b"the working directory"] = None

    def _imports(self, name: str, path: list[str] | None) -> None:
        """Record what was imported since the last event, and the module that will be."""
        changed = next((what.decode(errors="replace") for what in self._changes), "")
        if path is not None and [entry for entry in path if entry] != self._path:
            changed = "sys.path"
        if changed:
            listen(None)
            frame = _caller()
            place = f"{frame.f_code.co_filename}, line {frame.f_lineno}" if frame is not None else "the script"
            self._record.end(f"imports are learned up to {name}: {place}, imports it after {changed} was changed")
            return
        # A copy, since another thread may import.
        new = []
        for module in reversed([*sys.modules]):
            if module in self._seen:
                break
            new.append(module)
        self._seen.update(new)
        # What is imported while a library has set another type for tensors, say, would hold others.
        if self._state_of_torch() != self._torch_state:
            self._seen.add(name)
            return
        for module in reversed(new):
            if type(module) is str:
                self._record.append(self._mark + self._line(module))
        if not self._mark and [value() for value in self._seeds] != self._unseeded:
            self._mark = _SEEDED
        self._record.append(self._mark + self._line(name))

    def _line(self, name: str) -> str:
        file = (namespace_of(sys.modules.get(name)) or {}).get("__file__")
        return file if type(file) is str and is_own_file(file, self._directories) else name

    def _note_variable(self, name: bytes, value: bytes | None = None) -> None:
        if _caller() is None:
            self._environment[name] = value
        elif self._environment.get(name) == value:
            self._changes.pop(name, None)
        else:
            self._changes[name] = None

    def _state_of_torch(self) -> list[Any]:
        return [ask() for ask in self._torch]


def random_states() -> dict[str, Any]:
    """Return the states of the generators that modules share."""
    states: dict[str, Any] = {}
    if "random" in sys.modules:
        states["random"] = sys.modules["random"].getstate()
    if "numpy.random" in sys.modules and hasattr(sys.modules["numpy.random"], "get_state"):
        name, keys, *rest = sys.modules["numpy.random"].get_state()
        states["numpy.random"] = name, keys.tobytes(), *rest
    if "torch" in sys.modules:
        state = sys.modules["torch"].get_rng_state()
        states["torch"] = ctypes.string_at(state.data_ptr(), state.nbytes)
    return states


def _seeds() -> list[Callable[[], Any]]:
    """Return functions whose values change when a seed is set, and not when numbers are drawn.

    Takes one of two normal deviates: generators keep the other until the next such draw, or until a seed is set.
    """
    random.gauss(0.0, 1.0)
    values: list[Callable[[], Any]] = [lambda: random.getstate()[2]]
    numpy, torch = (sys.modules.get(name) for name in ("numpy.random", "torch"))
    if numpy is not None and hasattr(numpy, "get_state"):
        numpy.standard_normal()
        values.append(lambda: numpy.get_state()[3:])
    return values if torch is None else [*values, torch.initial_seed]


def _caller() -> FrameType | None:
    """Return the innermost frame outside of Python's library if it is the script's; else None."""
    frame: FrameType | None = sys._getframe(1)
    hook = observe.__code__.co_filename, listen.__code__.co_filename
    while frame is not None:
        file = frame.f_code.co_filename
        if file not in hook and (is_installed(file) or file.startswith(_OURS)):
            return None
        if file not in hook and not file.startswith(("<frozen", _STANDARD_LIBRARY)):
            return frame
        frame = frame.f_back
    return None


# One audit hook of this process (sys.addaudithook), for those that want to know of imports and changes of the
# process.
#
# A hook cannot be removed, and processes that are forked inherit it: it passes events on to the listener of the
# moment.
Listener = Callable[[str, tuple[Any, ...]], None]
"""Called with the name of an event and its arguments (docs.python.org, Audit events table)."""

_listener: Listener | None = None
_hooked = False


def listen(listener: Listener | None) -> None:
    """Pass events to this listener from now on, in place of the one before; None for nobody."""
    global _listener, _hooked
    _listener = listener
    if not _hooked:
        _hooked = True
        sys.addaudithook(_hook)


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    # Called for every `id`, too.
    if _listener is not None:
        _listener(event, arguments)
