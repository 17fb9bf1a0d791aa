"""Learns in the fork server what workers import: makes a list of their records, tries it, keeps it for later runs."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from importlib.machinery import PathFinder
from typing import Any, NamedTuple

from slurm_elastic.agent.forkserver._fork_eligibility import script_file
from slurm_elastic.agent.forkserver._import_list import (
    EVERYTHING,
    ImportList,
    UntrustedFileError,
    common,
    fingerprint,
    list_path,
    package_directories,
    read_list,
    write_list,
)
from slurm_elastic.agent.forkserver._import_record import ImportRecord, is_installed, observe
from slurm_elastic.agent.forkserver._import_trial import ImportTrial
from slurm_elastic.agent.forkserver._script_objects import namespace_of

_QUIET_SECONDS = 2.0
"""Seconds without a new import after which the fork server has tried what was recorded so far."""
_LONGEST_INTERVAL = 60.0
_MOST_FILES = 200
"""Files whose change times the agent compares before a round, at most."""
_OWN_PACKAGE = "slurm_elastic"


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
        preload: The modules of --preload, which are imported whether or not workers import them.
        script_directory: The entries that Python puts in front of sys.path for the script.
    """

    def __init__(
        self, directory: str | None, options: Sequence[str], preload: Sequence[str], script_directory: Sequence[str]
    ) -> None:
        self._directory, self._options, self._script_directory = directory, options, script_directory
        self._preload = tuple(preload)
        self._path = ""
        self._modules_before: set[str] = set()
        self.imports = ImportList()
        """What this process has imported for the script, and what it leaves out."""
        self._stored_list = ImportList()
        """The list as it is on disk, as far as this process knows."""
        self._tried: set[str] = set()
        self._records: dict[int, ImportRecord] = {}
        self._lines: list[list[str]] = []
        self._seeded: set[str] = set()
        self._seen = self._planned = 0
        self._next_look, self._interval = 0.0, _QUIET_SECONDS
        self._installed: dict[str, bool] = {}
        self._notes: list[str] = []
        self._reported: set[str] = set()

    @property
    def learns(self) -> bool:
        """Return whether workers record what they import."""
        return self._directory is not None

    def begin(self) -> Attempt | None:
        """Note the state that workers start from; return what the first replacement imports, None for nothing.

        That are the preloads, and the list that an earlier run has written.
        """
        self._modules_before = {*sys.modules}
        stored = None
        if self._directory is not None:
            path = [entry for entry in sys.path if entry not in self._script_directory]
            self._path = list_path(self._directory, self._options, path)
            stored = self._stored(note=True)
        if stored is not None and EVERYTHING in stored.left_out:
            self._notes.append(f"nothing is learned of this script's imports: {stored.left_out[EVERYTHING]}")
            self._directory, stored = None, None
        if stored is not None:
            self.imports = ImportList((), stored.left_out, files=stored.files)
            self._take_over(stored)
        modules = (*self._preload, *(stored.modules if stored is not None else ()))
        return Attempt(modules) if modules else None

    def _stored(self, *, note: bool = False) -> ImportList | None:
        """Read the list; None if there is none for the script as it is."""
        try:
            stored = read_list(self._path) if self._path else None
        except (UntrustedFileError, OSError) as error:
            if note:
                self._notes.append(f"learned imports are not used: {error}")
            return None
        return stored if stored is not None and stored.is_valid() else None

    # Records.

    def new_record(self) -> ImportRecord | None:
        """Return memory for the imports of a process that is about to be forked; None if nothing is learned."""
        return ImportRecord() if self.learns else None

    def add(self, pid: int, record: ImportRecord | None) -> None:
        """Read the record of this worker from now on."""
        if record is not None:
            self._records[pid] = record
            self._next_look = time.monotonic() + _QUIET_SECONDS

    def observe(self, record: ImportRecord | None) -> None:
        """In the worker: record imports from now on."""
        if record is not None:
            observe(record, self._script_directory)

    def round_over(self) -> None:
        """Keep what is on record and free the memory: no worker runs any more."""
        self._read_records()
        for record in self._records.values():
            record.close()
        self._records.clear()
        self._seen = self._planned = 0
        self._interval = _QUIET_SECONDS

    def _read_records(self) -> None:
        lines = [record.lines() for record in self._records.values()]
        self._lines = lines if any(lines) else self._lines
        self._seeded.update(*(record.seeded() for record in self._records.values()))
        reason = next((reason for record in self._records.values() if (reason := record.end_reason())), "")
        if reason and reason not in self._reported:
            self._reported.add(reason)
            self._notes.append(f"{reason}; --preload MODULES imports more")

    # The time of the next attempt.

    def seconds_to_look(self) -> float | None:
        """Return the seconds until `is_quiet` has to be asked again; None if no worker records imports."""
        return max(0.0, self._next_look - time.monotonic()) if self._records else None

    def is_quiet(self) -> bool:
        """Return whether workers have imported nothing new since the last call, at least 2 s ago."""
        if not self._records:
            return True
        if self.seconds_to_look():
            return False
        recorded = sum(len(record) for record in self._records.values())
        quiet = recorded == self._seen
        self._interval = min(2 * self._interval, _LONGEST_INTERVAL) if quiet else _QUIET_SECONDS
        self._seen = recorded
        self._next_look = time.monotonic() + self._interval
        return quiet

    def next_attempt(self) -> Attempt | None:
        """Return what a replacement of this process imports; None for no more than this process has imported."""
        if self._seen == self._planned:
            return None
        self._planned, self._interval = self._seen, _QUIET_SECONDS
        self._read_records()
        modules = self._new_modules()
        return Attempt(modules) if modules else None

    def _new_modules(self) -> tuple[str, ...]:
        """Return what all workers have imported and this process has not, in the order of first import."""
        passed_over = {*sys.modules, *self._tried, *self.imports.left_out}
        return tuple(name for name in common(self._lines) if name not in passed_over and self._is_installed(name))

    def _is_installed(self, module: str) -> bool:
        """Return whether a module is of an installed package, also where the script's directory comes first."""
        package = module.partition(".")[0]
        if package not in self._installed:
            spec = None
            with contextlib.suppress(ValueError, ImportError, OSError):
                spec = PathFinder.find_spec(package, [*self._script_directory, *sys.path])
            places: list[str] = []
            if spec is not None:
                places = [spec.origin] if spec.origin else list(spec.submodule_search_locations or ())
            self._installed[package] = package != _OWN_PACKAGE and bool(places) and all(map(is_installed, places))
        return self._installed[package]

    def attempt_after(self, attempt: Attempt, harm: str) -> Attempt | None:
        """Return the next attempt after one that has done harm; None to try no more."""
        if not attempt.apart:
            return attempt._replace(apart=True)
        self._tried.update(attempt.modules)
        self._notes.append(f"each worker imports the rest itself, as workers cannot share it: {harm}")
        return None

    # The attempt, in the replacement.

    def carry_out(self, attempt: Attempt, imported: Callable[[], None]) -> str:
        """Import modules in this process, and find out whether workers can be forked from it after that.

        Args:
            attempt: The modules, and how to import them.
            imported: Called before each import of a module.

        Returns:
            What keeps workers from being forked from it, for people; empty if nothing does.

        Raises:
            BrokenPreloadError: A preload cannot be imported.
        """
        # Another node with the same script and packages may have tried them.
        self._take_over(self._stored())
        modules = [name for name in attempt.modules if name not in self.imports.left_out]
        trial = ImportTrial(self._script_directory, self._preload, self._seeded, imported)
        harm = trial.apart(modules) if attempt.apart else trial.together(modules)
        for name in self._preload:
            if name in trial.broken:
                raise trial.broken[name]
        if harm:
            return harm
        self._tried.update(attempt.modules)
        left_out = {**self.imports.left_out, **trial.left_out}
        files = {**self.imports.files, **{file: fingerprint(file) for file in self._own_files()}}
        # With those that others have imported, and those that cannot be: they are not new.
        added = (name for name in modules if name not in {*self._preload, *left_out})
        listed = (*self.imports.modules, *added)
        self.imports = ImportList(listed, left_out, tuple(self._seeded), files)
        if not {*listed} <= {*self._stored_list.modules} or trial.left_out:
            self._keep()
        return ""

    def _take_over(self, stored: ImportList | None) -> None:
        """Take over a list."""
        if stored is not None and EVERYTHING not in stored.left_out:
            self._stored_list = stored
            self._seeded.update(stored.seeded)
            self.imports = replace(self.imports, left_out={**stored.left_out, **self.imports.left_out})

    def _own_files(self) -> Iterable[str]:
        script = script_file(self._options)
        own = [line for lines in self._lines for line in lines if os.path.isabs(line)]  # noqa: PTH117
        return dict.fromkeys([*([os.path.abspath(script)] if script else ()), *own])  # noqa: PTH100

    def _keep(self) -> None:
        """Write the list for later runs, with what other nodes have added to it."""
        if not self._path or not (self.imports.modules or self.imports.left_out):
            return
        stored, kept = self._stored(), self.imports
        if stored is not None and EVERYTHING not in stored.left_out:
            left_out = {**stored.left_out, **kept.left_out}
            modules = dict.fromkeys((*stored.modules, *kept.modules))
            kept = replace(kept, modules=tuple(name for name in modules if name not in left_out), left_out=left_out)
        try:
            write_list(self._path, kept)
        except (UntrustedFileError, OSError) as error:
            self._notes.append(f"learned imports are not kept for the next run: {error}")

    def message_fields(self) -> dict[str, Any]:
        """Return the fields about imports of the next message to the agent; notes and reasons are reported once."""
        left_out = self.imports.left_out
        new = {
            name: why for name, why in left_out.items() if name not in {*self._reported, *self._stored_list.left_out}
        }
        self._reported.update(new)
        notes, self._notes = self._notes, []
        return {
            "left_out": new,
            "notes": notes,
            "learned": self.learns and bool(self.imports.modules),
            "list": self._path,
            "changed": _changed_times(sys.modules.keys() - self._modules_before),
            "own": dict(self.imports.files) if self.imports.modules else {},
        }


def _changed_times(modules: Iterable[str]) -> Mapping[str, int]:
    """Return the change times (st_mtime_ns) of the files of modules; for installed packages, of their directories."""
    files = {(namespace_of(sys.modules.get(name)) or {}).get("__file__") for name in modules}
    installed = package_directories(sys.path)
    standard = os.path.dirname(os.__file__) + os.sep  # noqa: PTH120
    loose = [
        file for file in files if file and not file.startswith((standard, *(f"{path}{os.sep}" for path in installed)))
    ]
    times = {}
    for path in (*installed, *sorted(loose)[:_MOST_FILES]):
        with contextlib.suppress(OSError):
            times[path] = os.stat(path).st_mtime_ns  # noqa: PTH116
    return times
