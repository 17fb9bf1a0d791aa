"""Learns in the fork server what workers import: makes a list of their records, tries it, keeps it for later runs.

A record is memory in which a worker writes down what it imports, in order of first import, and what came after a seed
was set. A script that changes its environment, working directory or sys.path ends it before its next import; what an
installed package changes does not end it. The record of a killed worker is complete up to that moment.
"""

from __future__ import annotations

import mmap
import os
import random
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from types import FrameType
from typing import Any, NamedTuple

from slurm_elastic.agent.forkserver._fast_exit import namespace_of
from slurm_elastic.agent.forkserver._fork_eligibility import script_file
from slurm_elastic.agent.forkserver._import_list import (
    EVERYTHING,
    ImportList,
    common,
    fingerprint,
    list_path,
    package_directories,
    read_list,
    write_list,
)
from slurm_elastic.agent.forkserver._imports import ImportTrial, is_installed, is_own_file, listen
from slurm_elastic.errors import UsageError

_QUIET_SECONDS = 2.0
"""Seconds after the start of a worker, and without a new import, before what was recorded so far is imported: that has
to take no CPU time from workers that start."""


class Attempt(NamedTuple):
    """The modules that a replacement imports, and how."""

    modules: tuple[str, ...]
    apart: bool = False
    """Whether parts of them are tried in other processes."""


class ImportLearner:
    """The state of learning in one fork server; a replacement goes on with its copy (fork).

    Args:
        directory: The directory of the lists of imports; None to learn nothing.
        options: The words of a worker's command between the interpreter and the script's own arguments.
        script_directory: The entries that Python puts in front of sys.path for the script.
    """

    def __init__(
        self, directory: str | None, options: Sequence[str], preload: Sequence[str], script_directory: Sequence[str]
    ) -> None:
        self._directory, self._options, self._script_directory = directory, options, script_directory
        self._preload = tuple(preload)
        self._path = ""
        self.imports = ImportList()
        """The modules that this process has imported for the script, and what is left out."""
        self._tried: set[str] = set()
        self._records: list[ImportRecord] = []
        self._lines: list[list[str]] = []
        self._seeded: set[str] = set()
        self._seen = self._planned = 0
        self._next_look = 0.0
        self._due: Attempt | None = None
        self._notes: list[str] = []
        self._reported: set[str] = set()

    def begin(self) -> bool:
        """Return whether there is something to import before the first workers.

        That are the preloads, and the list that an earlier run has written.
        """
        if self._directory is not None:
            path = [entry for entry in sys.path if entry not in self._script_directory]
            self._path = list_path(self._directory, self._options, path)
        stored = self._stored()
        if EVERYTHING in stored.left_out:
            self._note(f"nothing is learned of this script's imports: {stored.left_out[EVERYTHING]}")
            self._directory, stored = None, ImportList()
        # The run that has written the list has told of what it leaves out.
        self._reported.update(stored.left_out)
        self._seeded.update(stored.seeded)
        self.imports = replace(stored, modules=())
        modules = tuple(name for name in (*self._preload, *stored.modules) if name not in stored.left_out)
        self._due = Attempt(modules) if modules else None
        return bool(modules)

    def _stored(self) -> ImportList:
        """Return the list on disk; an empty one if there is none for the script as it is."""
        try:
            stored = read_list(self._path) if self._path else None
        except (UsageError, OSError) as error:
            self._note(f"learned imports are not used: {error}")
            stored = None
        return stored if stored is not None and stored.is_valid() else ImportList()

    def _note(self, text: str) -> None:
        if text not in self._reported:
            self._reported.add(text)
            self._notes.append(text)

    # Records.

    def new_record(self) -> ImportRecord | None:
        """Return memory for the imports of a process that is about to be forked; None if nothing is learned."""
        if self._directory is None:
            return None
        self._records.append(ImportRecord())
        self._next_look = time.monotonic() + _QUIET_SECONDS
        return self._records[-1]

    def observe(self, record: ImportRecord | None) -> None:
        """In the worker: record imports from now on."""
        if record is not None:
            listen(ImportRecorder(record, self._script_directory))

    def round_over(self) -> None:
        """Keep what is on record and free the memory: no worker runs any more."""
        self._read_records()
        self._records.clear()
        self._seen = self._planned = 0

    def _read_records(self) -> None:
        lines = [record.lines() for record in self._records]
        self._lines = lines if any(lines) else self._lines
        self._seeded.update(*(record.seeded() for record in self._records))
        if reason := next(filter(None, (record.end_reason() for record in self._records)), ""):
            self._note(f"{reason}; --preload MODULES imports more")

    # The time of the next attempt.

    def seconds_to_look(self) -> float | None:
        """Return the seconds until `next_attempt` has to be asked again; None if no worker records imports."""
        return max(0.0, self._next_look - time.monotonic()) if self._records else None

    def next_attempt(self) -> Attempt | None:
        """Return what a replacement imports that this process has not; None for nothing, or not yet.

        It is what is due from the start, or after harm. Else workers have to have imported nothing new since the last
        call, and to have been started at least 2 s ago.
        """
        due, self._due = self._due, None
        if due is not None or not self._records or self.seconds_to_look():
            return due
        recorded = sum(len(record) for record in self._records)
        quiet, self._seen = recorded == self._seen, recorded
        self._next_look = time.monotonic() + _QUIET_SECONDS
        if not quiet or recorded == self._planned:
            return None
        self._planned = recorded
        self._read_records()
        modules = self._new_modules()
        return Attempt(modules) if modules else None

    def _new_modules(self) -> tuple[str, ...]:
        """Return what all workers have imported and this process has not, in the order of first import."""
        passed_over = {*sys.modules, *self._tried, *self.imports.left_out}
        return tuple(name for name in common(self._lines) if name not in passed_over and not _is_path(name))

    def tries_again(self, attempt: Attempt, harm: str) -> bool:
        """Return whether another attempt is due after one that has done harm."""
        if not attempt.apart:
            self._due = attempt._replace(apart=True)
            return True
        self._tried.update(attempt.modules)
        self._note(f"each worker imports the rest itself, as workers cannot share it: {harm}")
        return False

    # The attempt, in the replacement.

    def carry_out(self, attempt: Attempt) -> dict[str, str]:
        """Import modules in this process, and find out whether workers can be forked from it after that.

        Returns the "harm" that keeps workers from being forked, and what is "broken", a preload that cannot be
        imported: both for people, and empty for none.
        """
        modules = attempt.modules
        trial = ImportTrial(self._script_directory, self._preload, self._seeded)
        harm = trial.carry_out(modules, apart=attempt.apart)
        if harm or trial.broken:
            return {"harm": harm, "broken": trial.broken}
        self._tried.update(modules)
        # With those that others have imported, and those that cannot be: they are not new.
        added = tuple(name for name in modules if name not in self._preload)
        files = {file: fingerprint(file) for file in self._own_files()}
        self.imports = self.imports.with_those_of(ImportList(added, trial.left_out, tuple(self._seeded), files))
        self._keep()
        return {"harm": "", "broken": ""}

    def _own_files(self) -> Iterable[str]:
        script = script_file(self._options)
        own = [line for lines in self._lines for line in lines if _is_path(line)]
        return dict.fromkeys([*([os.path.abspath(script)] if script else ()), *own])  # noqa: PTH100

    def _keep(self) -> None:
        """Add what is new to the list of later runs, be it that nothing is learned."""
        if not self._path or not (self.imports.modules or self.imports.left_out):
            return
        stored = self._stored()
        known = stored.with_those_of(self.imports)
        try:
            if known != stored:
                write_list(self._path, known)
        except (UsageError, OSError) as error:
            self._note(f"learned imports are not kept for the next run: {error}")

    def message_fields(self) -> dict[str, Any]:
        """Return the fields about imports of the next message to the agent; notes and reasons are reported once."""
        new = {name: why for name, why in self.imports.left_out.items() if name not in self._reported}
        self._reported.update(new)
        notes, self._notes = self._notes, []
        files = {path: fingerprint(path) for path in package_directories(sys.path)}
        if self.imports.modules:
            files |= self.imports.files
        return {
            "left_out": new,
            "notes": notes,
            "learned": bool(self.imports.modules),
            "list": self._path,
            "files": files,
        }


def _is_path(line: str) -> bool:
    return line.startswith(os.sep)


_SIZE = 1 << 20
_ENDED = "!"
"""Begins the line that says why a record has ended."""
_SEEDED = "~"
"""Begins the name of a module that was imported after a seed was set."""
_STANDARD_LIBRARY = os.path.dirname(os.__file__) + os.sep  # noqa: PTH120
_OURS = os.path.abspath(os.path.join(os.path.dirname(__file__), *[os.pardir] * 2)) + os.sep  # noqa: PTH100, PTH118, PTH120


class ImportRecord:
    """Memory of 1 MiB that a worker appends lines to, shared with the fork server. Lines beyond it are dropped.

    A line is the name of an installed module, or the path of a file of the script's own that was imported.
    """

    def __init__(self) -> None:
        # The kernel allocates pages when they are first written.
        self._memory = mmap.mmap(-1, _SIZE)

    def append(self, line: str) -> None:
        """Add one line, if there is room for it and for the zero that ends the text."""
        data = line.encode("utf-8", "surrogatepass") + b"\n"
        if self._memory.tell() + len(data) < _SIZE:
            self._memory.write(data)

    def __len__(self) -> int:
        """Return the number of bytes written so far."""
        return self._memory.find(b"\0", 0)

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
        # A worker that was killed may have left half a line.
        return self._memory[: len(self)].decode("utf-8", "replace").split("\n")[:-1]


class ImportRecorder:
    """Listens to the imports of this process, and records them; processes that it forks record nothing.

    Draws a number from `random` and from numpy, whose seeds have to be of the system. The directories are what Python
    puts in front of sys.path for the script.
    """

    def __init__(self, record: ImportRecord, directories: Sequence[str]) -> None:
        self._record, self._directories = record, directories
        self._process = os.getpid()
        self._path = [entry for entry in (*directories, *sys.path) if entry]
        self._environment: dict[bytes, bytes | None] = {**os.environb}
        self._changes: dict[bytes, None] = {}
        """What the script has changed: variables, and the working directory, for people."""
        self._seen, self._count = {*sys.modules}, len(sys.modules)
        torch: Any = sys.modules.get("torch")
        self._torch = (torch.get_default_dtype, torch.are_deterministic_algorithms_enabled) if torch else ()
        self._torch_state = self._state_of_torch()
        self._mark, self._seeds = "", _seeds()
        self._unseeded = [value() for value in self._seeds]

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        # Python code of a module is executed when it is in sys.modules already.
        if event in ("import", "exec"):
            if os.getpid() == self._process:
                self._note_modules()
                if event == "import":
                    self._note_changes(arguments[0], arguments[2])
        elif event in ("os.putenv", "os.unsetenv"):
            self._note_variable(*arguments)
        elif event == "os.chdir" and _caller() is not None:
            self._changes[b"the working directory"] = None

    def _note_modules(self) -> None:
        """Record what has come to sys.modules since the last event."""
        # Most code that is executed is no module's.
        if len(sys.modules) == self._count:
            return
        self._count = len(sys.modules)
        # A copy, since another thread may import.
        new = []
        for name in reversed([*sys.modules]):
            if name in self._seen:
                break
            new.append(name)
        self._seen.update(new)
        # What is imported while a library has set another type for tensors, say, would hold others.
        if self._state_of_torch() != self._torch_state:
            return
        for name in reversed(new):
            file = (namespace_of(sys.modules.get(name)) or {}).get("__file__")
            if type(name) is type(file) is str:
                if is_own_file(file, self._directories):
                    self._record.append(self._mark + file)
                elif is_installed(file) and not file.startswith(_OURS):
                    self._record.append(self._mark + name)

    def _note_changes(self, name: str, path: list[str] | None) -> None:
        """Look at what a module that is imported now finds."""
        if not self._mark and [value() for value in self._seeds] != self._unseeded:
            self._mark = _SEEDED
        changed = next((what.decode(errors="replace") for what in self._changes), "")
        if path is not None and [entry for entry in path if entry] != self._path:
            changed = "sys.path"
        if changed:
            listen(None)
            frame = _caller()
            place = f"{frame.f_code.co_filename}, line {frame.f_lineno}" if frame is not None else "the script"
            reason = f"imports are learned up to {name}: {place}, imports it after {changed} was changed"
            self._record.append(_ENDED + reason)

    def _note_variable(self, name: bytes, value: bytes | None = None) -> None:
        if _caller() is None:
            self._environment[name] = value
        elif self._environment.get(name) == value:
            self._changes.pop(name, None)
        else:
            self._changes[name] = None

    def _state_of_torch(self) -> list[Any]:
        return [ask() for ask in self._torch]


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
    hook = ImportRecord.append.__code__.co_filename, listen.__code__.co_filename
    while frame is not None:
        file = frame.f_code.co_filename
        if file not in hook and (is_installed(file) or file.startswith(_OURS)):
            return None
        if file not in hook and not file.startswith(("<frozen", _STANDARD_LIBRARY)):
            return frame
        frame = frame.f_back
    return None
