"""Facts about a run in a rehearsal, as workers wrote them down, and what its changes of round have cost. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from slurm_elastic.rehearsal.scenario import Mishap


@dataclass(slots=True)
class WorkerSeen:
    """A worker, as it has written down what it did. Times are of the machine's monotonic clock, in seconds.

    Attributes:
        steps: The steps of its calls of `should_stop`.
        pause: Longest time between two calls, without the waits of the rehearsal.
        asked: Place of its last call of `should_stop`, which is the one that told it to stop.
        woken: True if it was paused, and told to save when others had taken its place.
        late: Steps of the checkpoints that it reported after that.
        saved: Place of its last `report_checkpoint`.
        samples: Samples that it trained on: step, epoch, number.
        stop: When it was told to stop; None if it was not.
        ended: When it ended by itself; None if it was killed.
        waits: The mishap that it waits for now; None if it does not.
    """

    round: int
    rank: int
    node: str = ""
    pid: int = 0
    world_size: int = 0
    steps: list[int | None] = field(default_factory=list)
    pause: float = 0.0
    asked: str = ""
    losses: dict[int, float] = field(default_factory=dict)
    checkpoints: list[int] = field(default_factory=list)
    woken: bool = False
    late: list[int] = field(default_factory=list)
    saved: str = ""
    samples: list[tuple[int, int, int]] = field(default_factory=list)
    stop: float | None = None
    ended: float | None = None
    waits: int | None = None
    _since: float | None = None
    _pending: list[tuple[int, int]] = field(default_factory=list)

    @property
    def last_step(self) -> int | None:
        """The step of its last call."""
        return self.steps[-1] if self.steps else None

    def note(self, record: Mapping[str, Any]) -> None:
        """Take what it has written down next; `slurm_elastic.control._recording` has the kinds."""
        step: Any = record.get("step")
        at, self.waits = record["at"], record.get("mishap")
        match record["event"]:
            case "step":
                self.pause = max(self.pause, at - (self._since or at))
                self.steps.append(step)
                self._since, self.asked = at, record["place"]
                if step is not None:
                    # The call completes the step, with the samples before it.
                    self.samples += [(step, epoch, number) for epoch, number in self._pending]
                    self._pending.clear()
            case "goes_on":
                self._since = at
            case "wakes":
                self.woken = True
            case "stop":
                self.stop = self.stop or at
            case "loss":
                self.losses[step] = record["loss"]
            case "checkpoint":
                self.saved = record["place"]
                (self.late if self.woken else self.checkpoints).append(step)
            case "samples":
                self._pending += [(record["epoch"], number) for number in record["samples"]]
            case "ends":
                self.ended = self.ended or at


@dataclass(frozen=True, slots=True)
class Happened:
    """A mishap that has happened; it began at a time of the monotonic clock."""

    mishap: Mishap
    at: float
    round: int


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Everything that was seen of one run.

    Attributes:
        workers: In the order of rounds and ranks.
        restarts: Worker failures that were charged.
        failure: The root cause of the last failure of workers that agents have recorded; empty if there is none.
        warnings: Those of agents and workers about snapshots, each once.
        cut_short: Rounds whose workers should stop at a step and ended in another way, with the time at which they were
            ended.
        overwritten: Files that were changed in place while a checkpoint could be in them.
        halves: Half-written checkpoints that the rehearsal has left in a round, as a kill would.
        gave_up: Why the rehearsal has ended the run; empty if it has not.
    """

    workers: tuple[WorkerSeen, ...] = ()
    happened: tuple[Happened, ...] = ()
    finished: bool = False
    restarts: int = 0
    failure: str = ""
    warnings: tuple[str, ...] = ()
    cut_short: Mapping[int, float] = field(default_factory=dict)
    overwritten: tuple[str, ...] = ()
    halves: Mapping[int, str] = field(default_factory=dict)
    left: tuple[str, ...] = ()
    gave_up: str = ""

    @property
    def rounds(self) -> tuple[tuple[WorkerSeen, ...], ...]:
        """The workers of each round in which steps were taken, in the order of ranks."""
        numbers = sorted({worker.round for worker in self.workers if worker.steps})
        return tuple(tuple(worker for worker in self.workers if worker.round == number) for number in numbers)

    @property
    def last_step(self) -> int | None:
        """The last step of the run; None if no worker has given one."""
        return max((step for worker in self.workers for step in worker.steps if step is not None), default=None)


@dataclass(frozen=True, slots=True)
class Change:
    """The end of a round and the beginning of the next one with steps.

    Attributes:
        before: Number of the round that ended.
        last: Last step of the round, by its slowest worker.
        resumed: The step that the next round went on from.
        place: Where the script asks for its next step.
    """

    before: int
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


def losses(facts: RunFacts) -> dict[int, float]:
    """Return the losses of the steps that counted, each the mean of all ranks."""
    by_step: dict[int, list[float]] = {}
    for step, loss in counted(facts, lambda worker: worker.losses.items()):
        by_step.setdefault(step, []).append(loss)
    return {step: fmean(values) for step, values in sorted(by_step.items())}


def counted(facts: RunFacts, noted: Callable[[WorkerSeen], Iterable[tuple[Any, ...]]]) -> Iterator[tuple[Any, ...]]:
    """Yield what workers have noted, each with its step first, of the steps that were not taken again."""
    firsts = [min(first_steps(round_), default=0) for round_ in facts.rounds]
    for index, round_ in enumerate(facts.rounds, 1):
        end = min(firsts[index:], default=math.inf)
        yield from (item for worker in round_ for item in noted(worker) if item[0] < end)


def changes_of(facts: RunFacts) -> list[Change]:
    """Return the changes of round in the order of rounds."""
    changes: list[Change] = []
    checkpoint: int | None = None
    for before, after in itertools.pairwise(facts.rounds):
        lasts = [worker.last_step for worker in before if worker.last_step is not None]
        firsts = first_steps(after)
        saved = [step for worker in before for step in worker.checkpoints]
        checkpoint = max(saved if checkpoint is None else [*saved, checkpoint], default=None)
        if not lasts or not firsts:
            continue
        numbers = range(before[0].round, after[0].round)
        changes.append(
            Change(
                before=before[0].round,
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
    """Return the first steps of the workers that have told theirs."""
    return [step for worker in round_ for step in worker.steps[:1] if step is not None]
