"""Decides from the workers' records which modules the fork server imports for later workers. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from slurm_elastic.agent.forkserver._source_effects import PATCH, SEED, Effect, effect_before

_DIFFERENT_STATE = "the workers of a node import it under different environments"
_SOME_RANKS = "some workers import it and others do not"


@dataclass(frozen=True, slots=True)
class ImportStep:
    """One module to import."""

    module: str
    state: str = "{}"
    """State during the import, as far as it differs from that at the start: a JSON object, see `_import_recorder`."""


@dataclass(frozen=True, slots=True)
class RecordedImport:
    """A module that a worker has imported, and the place in the script's own files that has caused it."""

    step: ImportStep
    file: str
    line: int
    function: str
    own_files: tuple[str, ...]
    """The files of the script's own modules that were imported before."""


@dataclass(frozen=True, slots=True)
class WorkerImports:
    """The modules that one worker imported, in this order."""

    imports: tuple[RecordedImport, ...]
    own_files: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ImportPlan:
    """The modules to import, in this order, and those to leave out, with the reason for people."""

    steps: tuple[ImportStep, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)


def parse_record(text: str) -> WorkerImports:
    """Parse a worker's record; lines that are cut short or unknown are skipped."""
    state, own, found = "{}", [], {}
    for line in text.splitlines():
        kind, _blank, rest = line.partition(" ")
        if kind == "O":
            own.append(rest)
        elif kind == "S":
            state = rest
        elif kind == "I":
            module, file, number, function = (*rest.split("\t"), "", "", "")[:4]
            if module not in found and number.isdecimal():
                found[module] = RecordedImport(ImportStep(module, state), file, int(number), function, tuple(own))
    files = dict.fromkeys(entry.file for entry in found.values() if entry.file)
    return WorkerImports(tuple(found.values()), tuple(dict.fromkeys((*files, *own))))


def plan_imports(
    workers: Sequence[WorkerImports],
    sources: Mapping[str, tuple[tuple[Effect, ...], int | None]],
    known: ImportPlan = ImportPlan(),
) -> ImportPlan:
    """Decide what later workers are forked with.

    Args:
        workers: The records of the workers of one node.
        sources: The effects of the script's own files, see `effect_before`.
        known: The plan so far, of this node or another one.
    """
    recorded = [worker for worker in workers if worker.imports]
    if not recorded:
        return known
    left_out = dict(known.left_out)
    steps = {step.module: step for step in known.steps if step.module not in left_out}
    longest = max(recorded, key=lambda worker: len(worker.imports))
    entries = {id(worker): {entry.step.module: entry for entry in worker.imports} for worker in recorded}
    position = {entry.step.module: index for index, entry in enumerate(longest.imports)}
    reached = {
        id(worker): max((position.get(module, -1) for module in entries[id(worker)]), default=-1) for worker in recorded
    }
    for worker in recorded:
        for module in entries[id(worker)].keys() - position.keys():
            # Modules that some workers have not reached yet are in the longest record; these are not.
            left_out.setdefault(module, _SOME_RANKS)
    for index, entry in enumerate(longest.imports):
        module = entry.step.module
        if module in left_out or module in steps:
            continue
        others = [entries[id(worker)].get(module) for worker in recorded]
        place = entry.own_files, entry.file, entry.line, entry.function
        patch = effect_before(PATCH, sources, *place)
        if patch is not None:
            left_out[module] = f"it is imported after {patch}"
        elif any(other is None and reached[id(worker)] > index for worker, other in zip(recorded, others, strict=True)):
            left_out[module] = _SOME_RANKS
        elif any(other is not None and other.step != entry.step for other in others):
            left_out[module] = _DIFFERENT_STATE
        elif all(other is not None for other in others):
            seeded = effect_before(SEED, sources, *place) is not None
            steps[module] = ImportStep(module, _seeded(entry.step.state)) if seeded else entry.step
    return ImportPlan(tuple(step for step in steps.values() if step.module not in left_out), left_out)


def _seeded(state: str) -> str:
    return json.dumps({**json.loads(state), "seeded": True}, sort_keys=True)


def merge(mine: ImportPlan, theirs: ImportPlan) -> ImportPlan:
    """Return the union of two nodes' plans: the modules of both, without those that either leaves out."""
    left_out = {**theirs.left_out, **mine.left_out}
    steps = {step.module: step for step in (*mine.steps, *theirs.steps)}
    return ImportPlan(tuple(step for step in steps.values() if step.module not in left_out), left_out)


@dataclass(frozen=True, slots=True)
class Bisection:
    """A binary search for the step after which forked processes do not work; each attempt imports the first n steps."""

    plan: ImportPlan
    reason: str
    works: int = 0
    """The largest number of steps that is known to work."""
    fails: int = 0
    """The smallest number of steps that is known to fail."""

    def attempt(self) -> ImportPlan:
        """Return the plan of the next attempt."""
        return ImportPlan(self.plan.steps[: (self.works + self.fails) // 2], self.plan.left_out)

    def after(self, *, fails: bool) -> Bisection | ImportPlan:
        """Return the search after this attempt; when the step is found, the plan without it."""
        tried = (self.works + self.fails) // 2
        search = Bisection(self.plan, self.reason, self.works if fails else tried, tried if fails else self.fails)
        if search.fails - search.works > 1:
            return search
        culprit = self.plan.steps[search.works].module
        steps = tuple(step for step in self.plan.steps if step.module != culprit)
        return ImportPlan(steps, {**self.plan.left_out, culprit: self.reason})


def to_json(plan: ImportPlan) -> str:
    """Return the plan as text for `from_json`."""
    return json.dumps({"steps": [[step.module, step.state] for step in plan.steps], "left_out": dict(plan.left_out)})


def from_json(text: str) -> ImportPlan:
    """Parse a plan.

    Raises:
        ValueError: The text is not a plan.
    """
    try:
        content = json.loads(text)
        steps = tuple(ImportStep(str(module), str(state)) for module, state in content["steps"])
        return ImportPlan(steps, {str(name): str(reason) for name, reason in content["left_out"].items()})
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no plan: {error}") from None
