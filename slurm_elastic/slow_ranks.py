"""Ranks that hold up the others: their paces and scores, and when one stays slow. Pure.

Ranks that train together take the same time per step, because the others wait in collectives for the slowest. So ranks
are compared by their busy time: that outside of collectives, with the wait for input, without checkpoints.

The scores are those of nvidia-resiliency-ext (straggler detection, 0.5), between 0 and 1: 0.5 stands for twice the
time.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

LOOK = 10.0
"""Seconds between two looks at all ranks, at least; a pace is measured over as long a time."""
LOOKS = 6
"""Looks in a row in which a rank has to be slow to be named, and fast to be so no more.

With three, a rank in twenty that takes twice the time in one look gave false alarms in an hour of 256 even ranks.
"""
SLOW, FAST = 0.75, 0.85
"""Relative scores below which a rank is slow, and from which on it is not. The former is nvidia-resiliency-ext's."""
_SHARE = 0.1
"""Share of a step by which a slow rank has to hold up the others: less is not worth a word."""
_STEPS = 5
"""Steps over which a pace is measured, at least: its ends lie within steps."""


@dataclass(frozen=True, slots=True)
class Reading:
    """Knowledge of a rank at one moment; times in seconds.

    Attributes:
        steps: Steps of the round so far.
        last: Monotonic time at which the last of them ended.
        waiting, loading, checkpoints: Time since the first step in collectives, waiting for input, with checkpoints.
    """

    steps: int
    last: float
    waiting: float
    loading: float
    checkpoints: float


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds per step of a rank.

    Attributes:
        step: All in all.
        busy: Outside of collectives and checkpoints.
        loading: Of that, waiting for input.
        waiting: In collectives.
        best: The least busy time of this rank in this round so far.
        number: How many times its pace was measured in this round.
    """

    step: float
    busy: float
    loading: float
    waiting: float
    best: float
    number: int = 1


@dataclass(frozen=True, slots=True)
class Meter:
    """The measurement of a rank's pace in a round.

    Attributes:
        begin: The reading at which the present measurement has begun; None before the first step.
    """

    begin: Reading | None = None
    pace: Pace | None = None


def read(meter: Meter, reading: Reading, window: float = LOOK) -> Meter:
    """Return the measurement after one more reading.

    Args:
        window: Seconds over which a pace is measured, at least.
    """
    begin = meter.begin
    if begin is None or reading.steps < begin.steps:
        return Meter(reading)
    steps, seconds = reading.steps - begin.steps, reading.last - begin.last
    if steps < _STEPS or seconds < window:
        return meter
    step = seconds / steps
    waiting, loading, checkpoints = (
        max(0.0, min(1.0, (getattr(reading, use) - getattr(begin, use)) / seconds))
        for use in ("waiting", "loading", "checkpoints")
    )
    busy = step * max(0.0, 1 - waiting - checkpoints)
    best, number = (busy, 1) if meter.pace is None else (min(busy, meter.pace.best), meter.pace.number + 1)
    return Meter(reading, Pace(step, busy, step * loading, step * waiting, best, number))


@dataclass(frozen=True, slots=True)
class Score:
    """The scores of a rank, between 0 (slow) and 1.

    Attributes:
        relative: The median busy time of the other ranks by its own; None without others.
        individual: The least busy time of this rank in this round by that of now.
        others: The median busy time of the other ranks; None without others.
    """

    relative: float | None
    individual: float
    others: float | None = None


def scores(paces: Mapping[int, Pace]) -> dict[int, Score]:
    """Return the scores by rank."""
    ordered = sorted(pace.busy for pace in paces.values())
    by_rank = {}
    for rank, pace in paces.items():
        others = _median_without(ordered, pace.busy)
        relative = None if others is None else _ratio(others, pace.busy)
        by_rank[rank] = Score(relative, _ratio(pace.best, pace.busy), others)
    return by_rank


def _median_without(ordered: Sequence[float], value: float) -> float | None:
    """Return the median of ascending numbers without one that is among them."""
    count = len(ordered) - 1
    if count < 1:
        return None
    gone = bisect.bisect_left(ordered, value)
    low, high = ((at if at < gone else at + 1) for at in ((count - 1) // 2, count // 2))
    return (ordered[low] + ordered[high]) / 2


def _ratio(less: float, more: float) -> float:
    return 1.0 if more <= less else max(0.0, less / more)


@dataclass(frozen=True, slots=True)
class SlowRank:
    """A rank that stays slow, or, with `over`, is slow no more.

    Its pace and its score are those of the last look.
    """

    rank: int
    pace: Pace
    score: Score
    over: bool = False


@dataclass(frozen=True, slots=True)
class SlowRanks:
    """The knowledge about the ranks of a round.

    Attributes:
        named: The ranks that stay slow, with their last look.
        against: How many looks in a row have spoken for a change, by rank: that one which is not named is slow, or
            that one which is named is not.
        seen: The number of the last pace, by rank.
    """

    named: Mapping[int, SlowRank] = field(default_factory=dict)
    against: Mapping[int, int] = field(default_factory=dict)
    seen: Mapping[int, int] = field(default_factory=dict)


def step(state: SlowRanks, paces: Mapping[int, Pace]) -> tuple[SlowRanks, tuple[SlowRank, ...]]:
    """Return the knowledge after one more look, and the ranks for which it has changed.

    Args:
        paces: By rank; one that was seen before says nothing new about its rank.
    """
    named, against = dict(state.named), dict(state.against)
    changed = []
    for rank, score in scores(paces).items():
        pace = paces[rank]
        if state.seen.get(rank) == pace.number:
            continue
        if rank in named:
            named[rank] = replace(named[rank], pace=pace, score=score)
        if not _speaks_for_change(pace, score, rank in named):
            against.pop(rank, None)
            continue
        against[rank] = against.get(rank, 0) + 1
        if against[rank] < LOOKS:
            continue
        del against[rank]
        now = SlowRank(rank, pace, score, over=rank in named)
        changed.append(now)
        if now.over:
            del named[rank]
        else:
            named[rank] = now
    seen = {**state.seen, **{rank: pace.number for rank, pace in paces.items()}}
    return SlowRanks(named, against, seen), tuple(changed)


def _speaks_for_change(pace: Pace, score: Score, named: bool) -> bool:
    """Return True if a rank that is not named is slow, or one that is named is fast."""
    if score.relative is None or score.others is None:
        return named
    excess = pace.busy - score.others
    if named:
        return score.relative >= FAST or excess < _SHARE * pace.step / 2
    return score.relative < SLOW and excess >= _SHARE * pace.step
