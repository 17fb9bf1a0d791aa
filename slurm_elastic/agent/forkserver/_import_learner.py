"""Learns in the fork server what workers import: plans imports from their records, tries them, keeps the list."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import signal
import struct
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from slurm_elastic.agent.forkserver._fork_probe import probe_forks
from slurm_elastic.agent.forkserver._import_list import (
    EVERYTHING,
    StoredList,
    list_path,
    package_directories,
    read_list,
    write_list,
)
from slurm_elastic.agent.forkserver._import_plan import (
    Bisection,
    ImportPlan,
    ImportStep,
    WorkerImports,
    from_json,
    merge,
    parse_record,
    plan_imports,
    to_json,
)
from slurm_elastic.agent.forkserver._import_recorder import ImportRecord, current_state, observe
from slurm_elastic.agent.forkserver._import_replay import ImportReplay, SpoiledError
from slurm_elastic.agent.forkserver._namespaces import namespace_of
from slurm_elastic.agent.forkserver._preload import DEFERRED
from slurm_elastic.agent.forkserver._signed_file import UntrustedFileError
from slurm_elastic.agent.forkserver._source_effects import effects_of, fingerprint_of

_QUIET_SECONDS = 2.0
"""Seconds without a new import after which the fork server plans a replacement with what was recorded so far."""
_LONGEST_INTERVAL = 60.0
_MOST_CULPRITS = 16
"""Modules that are left out of one plan, each after an attempt of its own, before the learner gives the plan up."""
_MOST_FILES = 200
"""Files whose change times the agent compares before a round, at most."""
_MOST_OWN_FILES = 100
_UNKNOWN_SECONDS = 30.0
"""Assumed duration of imports that an earlier run has recorded and not tried."""
_PROBE_TIMEOUT = 20.0
_NUMBER = struct.Struct("=q")


class Outcome(NamedTuple):
    """The result that a replacement reports after it has imported a plan."""

    plan: ImportPlan
    """The plan that was imported or, if that is not complete, the one for the next replacement."""
    complete: bool
    """True if workers can be forked from the replacement."""
    probe: str = ""
    """The reason why processes forked from the replacement do not work; empty if they do."""
    broken: str = ""
    """The reason why a preload cannot be imported; empty if all can."""

    def packed(self) -> bytes:
        """Return it as one message."""
        return json.dumps({**self._asdict(), "plan": to_json(self.plan)}).encode()

    @classmethod
    def unpacked(cls, data: bytes) -> Outcome | None:
        """Parse `packed`; None for no data, because the replacement was killed."""
        content = json.loads(data) if data else None
        return cls(**{**content, "plan": from_json(content["plan"])}) if content is not None else None


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
        self._preload = tuple(ImportStep(name) for name in preload)
        self._path = ""
        self._base: dict[str, Any] = {}
        self._modules_before: set[str] = set()
        self.plan = ImportPlan()
        """The modules that this process has imported for the script, and those that are left out."""
        self.wanted = ImportPlan(self._preload)
        """The modules that the first replacement imports."""
        self.seconds = 0.0
        """The duration of these imports when they were done last."""
        self._records: dict[int, ImportRecord] = {}
        self._texts: list[str] = []
        self._bytes_seen = self._bytes_planned = self._modules_seen = 0
        self._next_look, self._interval = 0.0, _QUIET_SECONDS
        self._culprits = 0
        self._has_failed = False
        """True if a replacement could not import a plan: from then on each module is checked."""
        self._bisection: Bisection | None = None
        self._progress = mmap.mmap(-1, mmap.PAGESIZE)
        self._verified: ImportPlan | None = None
        self._fingerprints: dict[str, str] = {}
        """Fingerprints of the script's own files at the time when their imports were recorded."""
        self._notes: list[str] = []
        self._reported: set[str] = set()

    @property
    def is_searching(self) -> bool:
        """Return whether attempts search for a harmful module; such a process does not become the fork server."""
        return self._bisection is not None

    @property
    def learns(self) -> bool:
        """Return whether workers record what they import."""
        return self._directory is not None

    def begin(self) -> None:
        """Note the state that workers start from, and read the list that an earlier run has written."""
        self._modules_before = {*sys.modules}
        self._base = current_state([*self._script_directory, *sys.path])
        if self._directory is None:
            return
        path = [entry for entry in sys.path if entry not in self._script_directory]
        self._path = list_path(self._directory, self._options, path)
        stored = self._stored() if self._path else None
        if stored is not None and EVERYTHING in stored.plan.left_out:
            self._notes.append(f"nothing is learned of this script's imports: {stored.plan.left_out[EVERYTHING]}")
            self._directory = None
        elif stored is not None and self._is_valid(stored):
            self.plan = ImportPlan((), stored.plan.left_out)
            self.wanted = ImportPlan((*self._preload, *stored.plan.steps), stored.plan.left_out)
            self._fingerprints = dict(stored.effects)
            self._verified = self.wanted if stored.verified else None
            self.seconds = stored.seconds if stored.verified else _UNKNOWN_SECONDS

    def _stored(self) -> StoredList | None:
        try:
            return read_list(self._path)
        except (UntrustedFileError, OSError) as error:
            self._notes.append(f"learned imports are not used: {error}")
            return None

    def _is_valid(self, stored: StoredList) -> bool:
        """Return whether the script's files have the same effects on imports as when the list was written."""
        return all(fingerprint_of(file) == value for file, value in stored.effects.items())

    # Records.

    def new_record(self) -> ImportRecord | None:
        """Return memory for the imports of a process that is about to be forked; None if nothing is learned."""
        return ImportRecord() if self.learns else None

    def add(self, pid: int, record: ImportRecord | None) -> None:
        """Read the record of this worker from now on."""
        if record is not None:
            self._records[pid] = record
            self._next_look = time.monotonic() + _QUIET_SECONDS

    def observed(self) -> frozenset[int]:
        """Return the pids of the workers whose records are read."""
        return frozenset(self._records)

    def observe(self, record: ImportRecord | None) -> None:
        """In the worker: record imports from now on."""
        if record is not None:
            observe(record, self._script_directory)

    def round_over(self) -> None:
        """Keep the text of the records and free their memory: no worker runs any more."""
        texts = [record.text() for record in self._records.values()]
        if any(texts):
            self._texts = texts
        for record in self._records.values():
            record.close()
        self._records.clear()
        self._bytes_seen = self._bytes_planned = self._modules_seen = 0
        self._interval = _QUIET_SECONDS

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
        imported = sum(record.modules() for record in self._records.values())
        quiet = imported == self._modules_seen
        self._interval = min(2 * self._interval, _LONGEST_INTERVAL) if quiet else _QUIET_SECONDS
        self._modules_seen, self._bytes_seen = imported, sum(len(record) for record in self._records.values())
        self._next_look = time.monotonic() + self._interval
        return quiet

    def has_new_imports(self) -> bool:
        """Return whether workers have recorded imports since the last `make_plan`."""
        return self._bytes_seen != self._bytes_planned

    def make_plan(self) -> None:
        """Base the next plan on what was recorded so far."""
        self._bytes_planned, self._interval = self._bytes_seen, _QUIET_SECONDS
        self._culprits, self._bisection = 0, None
        self._texts = [record.text() for record in self._records.values()] or self._texts

    def next_plan(self, deferred: Sequence[str]) -> ImportPlan:
        """Return what the replacement of this process imports.

        Args:
            deferred: Modules of `DEFERRED` that this process has not imported; they come first.
        """
        workers = [parse_record(text) for text in self._texts]
        sources = {file: effects_of(file) for worker in workers for file in worker.own_files}
        known = self.plan if workers else ImportPlan(self.wanted.steps, self.plan.left_out)
        plan = plan_imports(workers, sources, known)
        steps = {step.module: step for step in (*map(ImportStep, deferred), *self._preload, *plan.steps)}
        return ImportPlan(tuple(step for step in steps.values() if step.module not in plan.left_out), plan.left_out)

    def would_change(self, plan: ImportPlan) -> bool:
        """Return whether a replacement that imports this plan would differ from this process."""
        fingerprints = _fingerprints([parse_record(text) for text in self._texts])
        return (
            any(step.module not in sys.modules for step in plan.steps)
            or plan.left_out != self.plan.left_out
            or not fingerprints.items() <= self._fingerprints.items()
        )

    # The attempt, in the replacement.

    def attempt(self, plan: ImportPlan, imported: Callable[[], None], *, low_priority: bool) -> Outcome:
        """Import a plan in this process, and find out whether workers can be forked from it after that.

        Args:
            plan: The modules to import.
            imported: Called after each module if another process has imported the whole plan before.
            low_priority: Whether other processes that want the CPU go first.
        """
        begun = time.monotonic()
        left_out_elsewhere = self._read_findings()
        if any(step.module in left_out_elsewhere for step in plan.steps):
            return Outcome(merge(plan, ImportPlan((), left_out_elsewhere)), complete=False)
        after_each = imported if self._is_verified(plan) else lambda: None
        check_modules = self._has_failed or not self._is_verified(plan)
        replay = ImportReplay(
            plan, self._base, self._note_progress, after_each, low_priority=low_priority, check_modules=check_modules
        )
        try:
            replay.run()
        except SpoiledError as spoiled:
            return Outcome(spoiled.plan, complete=False)
        self._note_progress(-1)
        for step in self._preload:
            if step.module in replay.broken:
                return Outcome(plan, complete=True, broken=replay.broken[step.module])
        if not self._is_verified(plan):
            # Another node may have tried the same plan while this node was importing.
            self._read_findings()
        if not self._is_verified(plan):
            trouble = probe_forks(_PROBE_TIMEOUT)
            if trouble is not None:
                return Outcome(plan, complete=False, probe=trouble)
        self.seconds = time.monotonic() - begun
        return Outcome(plan, complete=True)

    def keep_plan(self, plan: ImportPlan) -> None:
        """In the replacement that has imported a plan: keep it in memory, and on disk for later runs."""
        own = {*DEFERRED, *(step.module for step in self._preload)}
        workers = [parse_record(text) for text in self._texts]
        recorded = {entry.step.module for worker in workers for entry in worker.imports}
        listed = {step.module for step in self._verified.steps} if self._verified is not None else set()
        keep = tuple(step for step in plan.steps if step.module not in own or step.module in recorded | listed)
        self.plan = ImportPlan(keep, plan.left_out)
        self._progress = mmap.mmap(-1, mmap.PAGESIZE)
        fingerprints = _fingerprints(workers)
        self._fingerprints |= fingerprints
        if not self._path or self._is_verified(plan) or not (keep or plan.left_out):
            return
        try:
            with contextlib.suppress(UntrustedFileError):
                stored = read_list(self._path)
                if stored is not None and self._is_valid(stored):
                    self.plan = ImportPlan(keep, merge(self.plan, stored.plan).left_out)
                    fingerprints = {**stored.effects, **fingerprints}
                    write_list(self._path, StoredList(merge(self.plan, stored.plan), self.seconds, fingerprints))
                    return
            write_list(self._path, StoredList(self.plan, self.seconds, fingerprints))
        except (UntrustedFileError, OSError) as error:
            self._notes.append(f"learned imports are not kept for the next run: {error}")

    def save_unverified(self) -> None:
        """At the end of the agent: keep on disk what workers have recorded and no replacement has tried."""
        texts = [record.text() for record in self._records.values()] or self._texts
        if not self._path or not any(texts):
            return
        self._texts = texts
        plan = self.next_plan(())
        own = {step.module for step in self._preload}
        keep = ImportPlan(tuple(step for step in plan.steps if step.module not in own), plan.left_out)
        fingerprints = _fingerprints([parse_record(text) for text in texts])
        with contextlib.suppress(UntrustedFileError, OSError):
            stored = read_list(self._path)
            if stored is None or (EVERYTHING not in stored.plan.left_out and not {*keep.steps} <= {*stored.plan.steps}):
                write_list(self._path, StoredList(keep, 0.0, fingerprints, verified=False))

    def _read_findings(self) -> Mapping[str, str]:
        """Read what other nodes with the same script and packages have tried; return what they leave out."""
        if self.is_searching:
            # A search tries a given number of steps: findings of other nodes would change that.
            return {}
        with contextlib.suppress(UntrustedFileError, OSError):
            stored = read_list(self._path) if self._path else None
            if (
                stored is not None
                and stored.verified
                and EVERYTHING not in stored.plan.left_out
                and self._is_valid(stored)
            ):
                self._verified = stored.plan
                return stored.plan.left_out
        return {}

    def _is_verified(self, plan: ImportPlan) -> bool:
        """Return whether another process has tried this plan before, with those modules that lists do not contain."""
        unlisted = {*DEFERRED, *(step.module for step in self._preload)}
        tried, untried = (
            {step for step in steps if step.module not in unlisted}
            for steps in (self._verified.steps if self._verified is not None else (), plan.steps)
        )
        return self._verified is not None and untried == tried

    def _note_progress(self, number: int) -> None:
        _NUMBER.pack_into(self._progress, 0, number)

    # The result of the attempt, in the fork server.

    def next_attempt(self, plan: ImportPlan, outcome: Outcome | None, code: int) -> ImportPlan | None:
        """Return the plan of the next replacement, after one that has ended; None to try no more.

        Args:
            plan: The plan of the replacement that has ended.
            outcome: The outcome that it has reported; None if it was killed.
            code: Its exit code, or minus a signal's number.
        """
        self._has_failed = True
        found: Bisection | ImportPlan | None
        if outcome is None:
            found = self._without_fatal(plan, code)
        elif self._bisection is not None:
            found = self._bisection.after(fails=not outcome.complete)
        elif outcome.probe and len(outcome.plan.steps) > 1:
            # What this process has imported itself was tried and is harmless: the search begins after it.
            new = (number for number, step in enumerate(outcome.plan.steps) if step.module not in sys.modules)
            found = Bisection(outcome.plan, outcome.probe, next(new, 0), len(outcome.plan.steps))
        elif outcome.probe and outcome.plan.steps:
            found = ImportPlan((), {**outcome.plan.left_out, outcome.plan.steps[0].module: outcome.probe})
        else:
            found = outcome.plan
        self._bisection = found if isinstance(found, Bisection) else None
        following = found.attempt() if isinstance(found, Bisection) else found
        if following is not None:
            self.plan = ImportPlan(self.plan.steps, following.left_out)
        # A search is not counted: it halves the number of steps with each attempt.
        self._culprits += self._bisection is None
        if following is not None and self._culprits > _MOST_CULPRITS:
            self._notes.append(
                f"each worker imports everything anew: more than {_MOST_CULPRITS} modules cannot be shared;"
                " --learn-imports off ends the attempts"
            )
            return None
        return following

    def _without_fatal(self, plan: ImportPlan, code: int) -> ImportPlan | None:
        (number,) = _NUMBER.unpack_from(self._progress)
        if not 0 <= number < len(plan.steps):
            return None
        culprit = plan.steps[number].module
        steps = tuple(step for step in plan.steps if step.module != culprit)
        return ImportPlan(
            steps, {**plan.left_out, culprit: f"importing {culprit} ends the process ({_exit_text(code)})"}
        )

    def message_fields(self) -> dict[str, Any]:
        """Return the fields about imports of the next message to the agent; notes and reasons are reported once."""
        new = {name: reason for name, reason in self.plan.left_out.items() if name not in self._reported}
        verified = self._verified.left_out if self._verified is not None else {}
        self._reported.update(new)
        notes, self._notes = self._notes, []
        return {
            "left_out": {name: reason for name, reason in new.items() if name not in verified},
            "notes": notes,
            "learned": self.learns and bool(self.plan.steps),
            "list": self._path,
            "changed": _changed_times(sys.modules.keys() - self._modules_before),
            "own": _own_files(self._fingerprints),
        }


def _fingerprints(workers: Iterable[WorkerImports]) -> dict[str, str]:
    """Return the fingerprints of the script's own files that these workers have imported or executed."""
    files = dict.fromkeys(file for worker in workers for file in worker.own_files)
    return {file: fingerprint_of(file) for file in files}


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


def _own_files(fingerprints: Mapping[str, str]) -> Mapping[str, tuple[int, str]]:
    """Return the change times (st_mtime_ns) and fingerprints of the script's own files."""
    found = {}
    for path in sorted(fingerprints)[:_MOST_OWN_FILES]:
        with contextlib.suppress(OSError):
            found[path] = os.stat(path).st_mtime_ns, fingerprints[path]  # noqa: PTH116
    return found


def _exit_text(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"
