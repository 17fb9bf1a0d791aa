"""Changes of round in a rehearsed run: where each went on from, and how many steps that has cost. Pure."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from slurm_elastic.rehearsal.facts import Happened, RunFacts, WorkerSeen


@dataclass(frozen=True, slots=True)
class Change:
    """The end of a round and the beginning of the next one with steps.

    Attributes:
        before, after: Numbers of the rounds.
        last: Last step of the round, by its slowest worker.
        resumed: The step that the next round went on from.
        lost: Steps that were taken again.
        checkpoint: The newest checkpoint that was reported; None if none was.
        causes: The mishaps between.
        place: Where the script asks for its next step.
    """

    before: int
    after: int
    last: int
    resumed: int
    lost: int
    checkpoint: int | None
    causes: tuple[Happened, ...]
    place: str

    @property
    def announced(self) -> bool:
        """True if the workers could save before."""
        return bool(self.causes) and all(cause.mishap.announced for cause in self.causes)

    @property
    def cause(self) -> str:
        """The mishaps as text."""
        return "; ".join(str(cause.mishap) for cause in self.causes) or "a worker failed by itself"


def steps_lost(facts: RunFacts) -> dict[str, int]:
    """Return the steps that were taken again, by what caused it."""
    counts: Counter[str] = Counter()
    for change in changes_of(facts):
        counts[change.cause] += change.lost
    return dict(counts)


def losses(facts: RunFacts) -> dict[int, float]:
    """Return the losses of the steps that counted: of each step as it was taken last, the mean of all ranks."""
    by_step: dict[int, float] = {}
    for round_ in facts.rounds:
        steps: dict[int, list[float]] = {}
        for worker in round_:
            for step, loss in worker.losses.items():
                steps.setdefault(step, []).append(loss)
        first = min(first_steps(round_), default=0)
        by_step = {step: loss for step, loss in by_step.items() if step < first}
        by_step.update({step: fmean(values) for step, values in steps.items()})
    return dict(sorted(by_step.items()))


def changes_of(facts: RunFacts) -> list[Change]:
    changes: list[Change] = []
    checkpoint: int | None = None
    for before, after in itertools.pairwise(facts.rounds):
        lasts = [worker.last_step for worker in before if worker.last_step is not None]
        firsts = first_steps(after)
        saved = [step for worker in before for step, _ in worker.checkpoints]
        checkpoint = max([*saved, *([] if checkpoint is None else [checkpoint])], default=None)
        if not lasts or not firsts:
            continue
        numbers = range(before[0].round, after[0].round)
        changes.append(
            Change(
                before=before[0].round,
                after=after[0].round,
                last=min(lasts),
                resumed=min(firsts) - 1,
                lost=max(0, min(lasts) - min(firsts) + 1),
                checkpoint=checkpoint,
                causes=tuple(happened for happened in facts.happened if happened.round in numbers),
                place=after[0].asked,
            )
        )
        if checkpoint is not None:
            # A later round writes its own over those beyond its beginning.
            checkpoint = min(checkpoint, changes[-1].resumed)
    return changes


def first_steps(round_: Sequence[WorkerSeen]) -> list[int]:
    return [worker.first_step for worker in round_ if worker.first_step is not None]


def is_left_out(round_: int, facts: RunFacts) -> bool:
    """Return True if the round after this one went on from the newest whole checkpoint."""
    return any(change.before == round_ and change.resumed >= (change.checkpoint or 0) for change in changes_of(facts))
