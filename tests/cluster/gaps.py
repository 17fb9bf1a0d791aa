"""How long the group stood still between two rounds, and what for, as timed_digits.py and the agents wrote it down."""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import Any

from tests.cluster.jobs import Job

Diary = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Gap:
    """Seconds from the last step of one round to the first of the next one.

    Attributes:
        whole: of them, without `save`.
        agree: until the workers know at which step they stop.
        save: the checkpoint.
        end: from then until the last worker is through its script.
        round: until the next round is formed; processes end, agents say so.
        start: until the last worker's script runs.
        imports: until it has imported what it needs.
        meet: until all are in the process group.
        load: until they have the checkpoint.
        step: until the first step is done.
    """

    whole: float
    agree: float
    save: float
    end: float
    round: float
    start: float
    imports: float
    meet: float
    load: float
    step: float

    def __str__(self) -> str:
        parts = ", ".join(f"{field.name} {getattr(self, field.name):.2f}" for field in fields(self)[1:])
        return f"{self.whole:.2f} s ({parts})"


@dataclass(frozen=True, slots=True)
class Change:
    """From one round to the next.

    Attributes:
        gap: between their steps; None if workers did not stop at an agreed step, as then its parts are not known.
        lost: steps that were taken and have to be taken again.
        charged: restarts.
    """

    gap: Gap | None
    lost: int
    charged: int

    def __str__(self) -> str:
        gap = "no planned end" if self.gap is None else f"gap {self.gap}"
        return f"{self.lost} steps lost, {self.charged} restarts charged, {gap}"


def change(job: Job, round_number: int) -> Change:
    """What it cost to come to this round from the one before; both have taken steps."""
    rounds = job.rounds()
    before, after = _diaries(job, round_number - 1), _diaries(job, round_number)
    lost = 1 + max(_steps(before)) - min(_steps(after))
    charged = rounds[round_number]["restarts"] - rounds[round_number - 1]["restarts"]
    if not all(_has(diary, "told") for diary in before):
        return Change(None, lost, charged)
    last_step = _last(before, "step")
    saved = sum(e["seconds"] for diary in before for e in diary if e["what"] == "saved" and e["at"] > last_step)
    first_step = min(e["at"] for diary in after for e in diary if e["what"] == "step")
    marks = [last_step, _last(before, "told"), _last(before, "ended"), formed(job, round_number)]
    marks += [_last(after, what) for what in ("began", "imported", "met", "loaded")] + [first_step]
    agree, end, round_, start, imports, meet, load, step = (
        later - earlier for earlier, later in itertools.pairwise(marks)
    )
    gap = Gap(first_step - last_step - saved, agree, saved, end - saved, round_, start, imports, meet, load, step)
    return Change(gap, lost, charged)


def between(job: Job, round_number: int) -> float | None:
    """Seconds from the last step of any round before this one to the first of it, or of a later one; None as yet."""
    before = [e["at"] for number in range(round_number) for diary in _diaries(job, number) for e in _taken(diary)]
    later = range(round_number, len(job.tables()))
    after = [e["at"] for number in later for diary in _diaries(job, number) for e in _taken(diary)]
    return min(after) - max(before) if before and after else None


def has_stepped(job: Job, round_number: int) -> bool:
    """Whether every worker of a round has taken a step."""
    places = job.rounds()[round_number]["places"]
    diaries = _diaries(job, round_number)
    return len(diaries) == len(places) and all(_has(diary, "step") for diary in diaries)


def formed(job: Job, round_number: int) -> float:
    """When a round was formed, by the monotonic clock."""
    (event,) = [event for event in job.events("round_formed") if event["round"] == round_number]
    # One machine, one pair of clocks.
    return datetime.fromisoformat(event["time"]).timestamp() - time.time() + time.monotonic()


def summary(gaps: Sequence[Gap]) -> str:
    """Median and worst."""
    whole = [gap.whole for gap in gaps]
    if not whole:
        return "none"
    return f"median {statistics.median(whole):.2f} s, worst {max(whole):.2f} s of {len(whole)}"


def _diaries(job: Job, round_number: int) -> list[Diary]:
    """What the workers of a round wrote down."""
    return [_read(path) for path in job.directory.glob(f"times/{round_number:04d}.*.jsonl")]


def _read(path: Path) -> Diary:
    text = path.read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def _steps(diaries: Iterable[Diary]) -> list[int]:
    return [e["step"] for diary in diaries for e in _taken(diary)]


def _taken(diary: Diary) -> Diary:
    return [e for e in diary if e["what"] == "step"]


def _has(diary: Diary, what: str) -> bool:
    return any(e["what"] == what for e in diary)


def _last(diaries: Iterable[Diary], what: str) -> float:
    return max(e["at"] for diary in diaries for e in diary if e["what"] == what)
