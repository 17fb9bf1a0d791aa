"""The fork server's part in learning what workers import: when, from what, and with which result."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import signal
import struct
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from slurm_elastic.agent.forkserver._fork_probe import probe_forks
from slurm_elastic.agent.forkserver._import_list import (
    EVERYTHING,
    ListError,
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
    from_json,
    merge,
    parse_record,
    plan_imports,
    to_json,
)
from slurm_elastic.agent.forkserver._import_recorder import ImportRecord, current_state, observe
from slurm_elastic.agent.forkserver._import_replay import ImportReplay, SpoiledError
from slurm_elastic.agent.forkserver._preload import LATER
from slurm_elastic.agent.forkserver._source_effects import effects_of, fingerprint

__all__ = ["ImportLearner", "Outcome"]

_QUIET = 2.0
"""Seconds without a new import after which a script is taken to have imported what it needs for now."""
_LONGEST_INTERVAL = 60.0
_MOST_CULPRITS = 16
"""Modules that one plan may lose, one after the other, before nothing of it is imported; each costs an attempt."""
_MOST_FILES = 200
"""That are looked at before a round."""
_MOST_OWN_FILES = 100
_UNKNOWN_SECONDS = 30.0
"""That imports are taken to need, where they were only recorded."""
_PROBE_TIMEOUT = 20.0
_NUMBER = struct.Struct("=q")


class Outcome(NamedTuple):
    """The answer of a process that was to import a plan."""

    plan: ImportPlan
    """What it has imported, or what the next one is to import."""
    complete: bool
    """Whether workers can be forked from it."""
    probe: str = ""
    """Why forked processes do not work, if they do not."""
    broken: str = ""
    """Why a preload cannot be imported."""

    def packed(self) -> bytes:
        """Return it as one message."""
        return json.dumps({**self._asdict(), "plan": to_json(self.plan)}).encode()

    @classmethod
    def unpacked(cls, data: bytes) -> Outcome | None:
        """Read one; None if there is none, because the process was killed."""
        content = json.loads(data) if data else None
        return cls(**{**content, "plan": from_json(content["plan"])}) if content is not None else None


class ImportLearner:
    """Belongs to one fork server, and to the process that is to replace it, which is a copy.

    Args:
        directory: where lists are kept; None if nothing is to be learned.
        options: what stands between the interpreter and the script's own arguments.
        preload: modules to import in any case.
        script_directory: what Python puts in front of sys.path for the script.
    """

    def __init__(
        self, directory: str | None, options: Sequence[str], preload: Sequence[str], script_directory: Sequence[str]
    ) -> None:
        self._directory, self._options, self._script_directory = directory, options, script_directory
        self._preload = tuple(ImportStep(name) for name in preload)
        self._path = ""
        self._base: dict[str, Any] = {}
        self._before: set[str] = set()
        self.plan = ImportPlan()
        """What is known of the script: what has been imported here, and what is left out."""
        self.wanted = ImportPlan(self._preload)
        """What is to be imported next."""
        self.seconds = 0.0
        """How long that took, when it was done last."""
        self._records: dict[int, ImportRecord] = {}
        self._texts: list[str] = []
        self._seen = self._handled = self._imported = 0
        self._look_at, self._interval = 0.0, _QUIET
        self._culprits = 0
        self._bisection: Bisection | None = None
        self._progress = mmap.mmap(-1, mmap.PAGESIZE)
        self._verified: ImportPlan | None = None
        self._prints: dict[str, str] = {}
        """Fingerprints of the script's own files, as they were when this was learned."""
        self._notes: list[str] = []
        self._said: set[str] = set()

    @property
    def searches(self) -> bool:
        """Return whether attempts are made to find a module that does harm, and not to take this process's place."""
        return self._bisection is not None

    @property
    def learns(self) -> bool:
        """Return whether workers record what they import."""
        return self._directory is not None

    def begin(self) -> None:
        """Note what workers will start from, and read the list that an earlier run has left."""
        self._before = {*sys.modules}
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
            self._prints = dict(stored.effects)
            self._verified = self.wanted if stored.verified else None
            self.seconds = stored.seconds if stored.verified else _UNKNOWN_SECONDS

    def _stored(self) -> StoredList | None:
        try:
            return read_list(self._path)
        except (ListError, OSError) as error:
            self._notes.append(f"learned imports are not used: {error}")
            return None

    def _is_valid(self, stored: StoredList) -> bool:
        """Return whether the script changes the same before its imports as when the list was written."""
        return all(fingerprint(effects_of(file)[0]) == value for file, value in stored.effects.items())

    # Records.

    def new_record(self) -> ImportRecord | None:
        """Return memory for the imports of a process that is about to be forked; None if nothing is learned."""
        return ImportRecord() if self.learns else None

    def add(self, pid: int, record: ImportRecord | None) -> None:
        """Read what this worker records."""
        if record is not None:
            self._records[pid] = record
            self._look_at = time.monotonic() + _QUIET

    def observed(self) -> frozenset[int]:
        """Return the workers whose records are read."""
        return frozenset(self._records)

    def observe(self, record: ImportRecord | None) -> None:
        """In the worker: record imports from now on."""
        if record is not None:
            observe(record, self._script_directory)

    def round_over(self) -> None:
        """No worker runs any more."""
        texts = [record.text() for record in self._records.values()]
        if any(texts):
            self._texts = texts
        for record in self._records.values():
            record.close()
        self._records.clear()
        self._seen = self._handled = self._imported = 0
        self._interval = _QUIET

    # When.

    def seconds_to_look(self) -> float | None:
        """When to ask `has_news`; None if workers record nothing."""
        return max(0.0, self._look_at - time.monotonic()) if self._records else None

    def is_quiet(self) -> bool:
        """Return whether workers have imported nothing new for a while."""
        if not self._records:
            return True
        if self.seconds_to_look():
            return False
        imported = sum(record.modules() for record in self._records.values())
        quiet = imported == self._imported
        self._interval = min(2 * self._interval, _LONGEST_INTERVAL) if quiet else _QUIET
        self._imported, self._seen = imported, sum(len(record) for record in self._records.values())
        self._look_at = time.monotonic() + self._interval
        return quiet

    def has_news(self) -> bool:
        """Return whether something was imported since the last plan was made."""
        return self._seen != self._handled

    def make_plan(self) -> None:
        """Decide what to import, from what was recorded so far."""
        self._handled, self._interval = self._seen, _QUIET
        self._culprits, self._bisection = 0, None
        self._texts = [record.text() for record in self._records.values()] or self._texts

    def planned(self, later: Sequence[str]) -> ImportPlan:
        """Return what to import in the process that replaces this one.

        Args:
            later: modules that are imported first.
        """
        workers = [parse_record(text) for text in self._texts]
        sources = {file: effects_of(file) for worker in workers for file in worker.own_files}
        known = self.plan if workers else ImportPlan(self.wanted.steps, self.plan.left_out)
        plan = plan_imports(workers, sources, known)
        steps = {step.module: step for step in (*map(ImportStep, later), *self._preload, *plan.steps)}
        return ImportPlan(tuple(step for step in steps.values() if step.module not in plan.left_out), plan.left_out)

    # The attempt, in the process that is to replace this one.

    def attempt(self, plan: ImportPlan, *, gently: bool) -> Outcome:
        """Import a plan here, and look whether workers can be forked after that."""
        begun = time.monotonic()
        others_leave_out = self._take_over_findings()
        if any(step.module in others_leave_out for step in plan.steps):
            return Outcome(merge(plan, ImportPlan((), others_leave_out)), complete=False)
        replay = ImportReplay(plan, self._base, self._note_progress, gently=gently)
        try:
            replay.run()
        except SpoiledError as spoiled:
            return Outcome(spoiled.plan, complete=False)
        self._note_progress(-1)
        for step in self._preload:
            if step.module in replay.broken:
                return Outcome(plan, complete=True, broken=replay.broken[step.module])
        if not self._is_verified(plan):
            # Another node may have tried the same while this one was importing.
            self._take_over_findings()
        if not self._is_verified(plan):
            trouble = probe_forks(_PROBE_TIMEOUT)
            if trouble is not None:
                return Outcome(plan, complete=False, probe=trouble)
        self.seconds = time.monotonic() - begun
        return Outcome(plan, complete=True)

    def settle(self, plan: ImportPlan) -> None:
        """In the process that has imported a plan: keep it, here and on disk."""
        own = {*LATER, *(step.module for step in self._preload)}
        workers = [parse_record(text) for text in self._texts]
        recorded = {entry.step.module for worker in workers for entry in worker.imports}
        listed = {step.module for step in self._verified.steps} if self._verified is not None else set()
        keep = tuple(step for step in plan.steps if step.module not in own or step.module in recorded | listed)
        self.plan = ImportPlan(keep, plan.left_out)
        self._progress = mmap.mmap(-1, mmap.PAGESIZE)
        files = dict.fromkeys(file for worker in workers for file in worker.own_files)
        prints = {file: fingerprint(effects_of(file)[0]) for file in files}
        self._prints |= prints
        if not self._path or self._is_verified(plan) or not (keep or plan.left_out):
            return
        try:
            with contextlib.suppress(ListError):
                stored = read_list(self._path)
                if stored is not None and self._is_valid(stored):
                    self.plan = ImportPlan(keep, merge(self.plan, stored.plan).left_out)
                    prints = {**stored.effects, **prints}
                    write_list(self._path, StoredList(merge(self.plan, stored.plan), self.seconds, prints))
                    return
            write_list(self._path, StoredList(self.plan, self.seconds, prints))
        except (ListError, OSError) as error:
            self._notes.append(f"learned imports are not kept for the next run: {error}")

    def save_unverified(self) -> None:
        """At the end of the agent: keep for the next run what workers recorded, where there was no time to try it."""
        texts = [record.text() for record in self._records.values()] or self._texts
        if not self._path or not any(texts):
            return
        self._texts = texts
        plan = self.planned(())
        own = {step.module for step in self._preload}
        keep = ImportPlan(tuple(step for step in plan.steps if step.module not in own), plan.left_out)
        workers = [parse_record(text) for text in texts]
        files = dict.fromkeys(file for worker in workers for file in worker.own_files)
        prints = {file: fingerprint(effects_of(file)[0]) for file in files}
        with contextlib.suppress(ListError, OSError):
            stored = read_list(self._path)
            if stored is None or (EVERYTHING not in stored.plan.left_out and not {*keep.steps} <= {*stored.plan.steps}):
                write_list(self._path, StoredList(keep, 0.0, prints, verified=False))

    def _take_over_findings(self) -> Mapping[str, str]:
        """Read what another node with the same script and packages has tried meanwhile; return what it leaves out."""
        if self.searches:
            # A search tries a given number of steps, and no others.
            return {}
        with contextlib.suppress(ListError, OSError):
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
        unlisted = {*LATER, *(step.module for step in self._preload)}
        tried, untried = (
            {step for step in steps if step.module not in unlisted}
            for steps in (self._verified.steps if self._verified is not None else (), plan.steps)
        )
        return self._verified is not None and untried == tried

    def _note_progress(self, number: int) -> None:
        _NUMBER.pack_into(self._progress, 0, number)

    # What becomes of it, in the fork server.

    def next_attempt(self, plan: ImportPlan, outcome: Outcome | None, code: int) -> ImportPlan | None:
        """Return what the next process is to import, after one that does not take this one's place; None for nothing.

        Args:
            plan: what that one was to import.
            outcome: what it has said; None if it was killed.
            code: with which it ended.
        """
        found: Bisection | ImportPlan | None
        if outcome is None:
            found = self._without_deadly(plan, code)
        elif self._bisection is not None:
            found = self._bisection.after(fails=not outcome.complete)
        elif outcome.probe and len(outcome.plan.steps) > 1:
            # What this process has imported does no harm: it was tried.
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
        # A search ends by itself, after as many attempts as its number of steps has binary digits.
        self._culprits += self._bisection is None
        if following is not None and self._culprits > _MOST_CULPRITS:
            self._notes.append(
                f"each worker imports everything anew: more than {_MOST_CULPRITS} modules cannot be shared;"
                " --learn-imports off ends the attempts"
            )
            return None
        return following

    def _without_deadly(self, plan: ImportPlan, code: int) -> ImportPlan | None:
        (number,) = _NUMBER.unpack_from(self._progress)
        if not 0 <= number < len(plan.steps):
            return None
        culprit = plan.steps[number].module
        steps = tuple(step for step in plan.steps if step.module != culprit)
        return ImportPlan(steps, {**plan.left_out, culprit: f"importing {culprit} ends the process ({_how(code)})"})

    def news(self) -> dict[str, Any]:
        """Return what the agent has to know of a complete process."""
        new = {name: reason for name, reason in self.plan.left_out.items() if name not in self._said}
        verified = self._verified.left_out if self._verified is not None else {}
        self._said.update(new)
        notes, self._notes = self._notes, []
        return {
            "left_out": {name: reason for name, reason in new.items() if name not in verified},
            "notes": notes,
            "learned": self.learns and bool(self.plan.steps),
            "list": self._path,
            "changed": _changed_times(sys.modules.keys() - self._before),
            "own": _own_files(self._prints),
        }


def _changed_times(modules: Iterable[str]) -> Mapping[str, int]:
    """Return when the files were changed that modules came from; of installed ones, the directory that they are in."""
    files = {getattr(sys.modules.get(name), "__file__", None) for name in modules}
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


def _own_files(prints: Mapping[str, str]) -> Mapping[str, tuple[int, str]]:
    """Return when the script's own files were changed, and their fingerprints."""
    found = {}
    for path in sorted(prints)[:_MOST_OWN_FILES]:
        with contextlib.suppress(OSError):
            found[path] = os.stat(path).st_mtime_ns, prints[path]  # noqa: PTH116
    return found


def _how(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"
