"""The workers that the others wait for, when one hangs or a collective times out. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Collective:
    """The last collective that a worker has begun in a process group.

    Attributes:
        group: Name of the process group, the same on all ranks.
        number: Its sequence number in the group.
        operation: Such as ``all_reduce``.
    """

    group: str
    number: int
    operation: str


@dataclass(frozen=True, slots=True)
class WorkerPosition:
    """The position of a worker in its round.

    Attributes:
        rank: Rank of the worker.
        steps: Number of steps that it has taken; 0 too if its script does not use the trainer API.
        in_collective: True if its main thread is in a collective; None if that is unknown.
        place: The line of the script at which it stays; empty if that is unknown.
        collectives: Its last collective in each process group; empty if they are unknown.
    """

    rank: int
    steps: int
    in_collective: bool | None = None
    place: str = ""
    collectives: tuple[Collective, ...] = ()


@dataclass(frozen=True, slots=True)
class Stragglers:
    """The workers that the others wait for.

    Attributes:
        ranks: Their ranks; none if nothing tells.
        text: One line; empty if fewer than two workers are known, or nothing tells.
    """

    ranks: tuple[int, ...] = ()
    text: str = ""


def find_stragglers(positions: Sequence[WorkerPosition]) -> Stragglers:
    """Return the workers that the others wait for.

    A worker that never comes to a collective holds up all others in it, and their watchdogs expire like its own. The
    one to look at has taken fewer steps, or has begun fewer collectives of a process group by torch's flight recorder,
    or is in no collective by its stack. Workers that are in different collectives with the same number wait for each
    other: that is a mistake of the script, and none of them is a straggler.
    """
    if len(positions) < 2:
        return Stragglers()
    mismatch = _mismatch(positions)
    if mismatch:
        return Stragglers((), mismatch)
    least, most = min(one.steps for one in positions), max(one.steps for one in positions)
    behind, awaited = _by_collectives(positions)
    waited_for = f" ({awaited.operation}, number {awaited.number})" if awaited is not None else ""
    if least < most:
        slow = [one for one in positions if one.steps == least]
        into = f"; they wait in a collective{waited_for}" if awaited is not None else ""
        return _named(slow, f"behind: {least} steps in this round, others {most}{into}")
    absent = behind or [one for one in positions if one.in_collective is False]
    if behind or (absent and any(one.in_collective for one in positions)):
        after = f", after {least} steps" if least else ""
        return _named(absent, f"not in the collective that others wait in{waited_for}{after}")
    return Stragglers((), f"no worker is behind: {least} steps in this round everywhere" if least else "")


def _by_collectives(positions: Sequence[WorkerPosition]) -> tuple[list[WorkerPosition], Collective | None]:
    """Return the workers that have begun fewer collectives of a group than others, and the next one of that group.

    A worker may be behind in one group because it waits in another one: those that wait nowhere come first.
    """
    for group in dict.fromkeys(each.group for one in positions for each in one.collectives):
        last = {one.rank: each for one in positions for each in one.collectives if each.group == group}
        least = min(each.number for each in last.values())
        ahead = [each for each in last.values() if each.number > least]
        if not ahead:
            continue
        behind = [one for one in positions if one.rank in last and last[one.rank].number == least]
        outside = [one for one in behind if one.in_collective is not True]
        if outside or not any(one.in_collective is False for one in positions):
            return outside or behind, min(ahead, key=lambda each: each.number)
    return [], None


def _mismatch(positions: Sequence[WorkerPosition]) -> str:
    """Say which workers have begun different collectives with the same number; empty if none have."""
    for group in dict.fromkeys(each.group for one in positions for each in one.collectives):
        ordered = sorted(positions, key=lambda one: one.rank)
        begun = [(one, each) for one in ordered for each in one.collectives if each.group == group]
        number = max(each.number for _, each in begun)
        newest = [(one, each) for one, each in begun if each.number == number and one.in_collective is not False]
        common = Counter(each.operation for _, each in newest).most_common()
        if len(common) > 1:
            usual = common[0][0]
            others = [one for one, each in newest if each.operation != usual]
            operation = next(each.operation for one, each in newest if one is others[0])
            what = f"in {operation}, and others in {usual}, both number {number} of their process group"
            places = _places([next(one for one, each in newest if each.operation == usual), *others])
            return f"{_subject(others)} {what}: the script calls different collectives{places}"
    return ""


def _named(some: Sequence[WorkerPosition], what: str) -> Stragglers:
    return Stragglers(tuple(sorted(one.rank for one in some)), f"{_subject(some)} {what}{_places(some)}")


def _subject(some: Sequence[WorkerPosition]) -> str:
    ranks = sorted(one.rank for one in some)
    shown = ", ".join(str(rank) for rank in ranks[:_SHOWN]) + (", ..." if len(ranks) > _SHOWN else "")
    return f"ranks {shown} are" if len(ranks) > 1 else f"rank {shown} is"


def _places(some: Sequence[WorkerPosition]) -> str:
    places = sorted({one.place for one in some if one.place})
    return f"; at {', '.join(places[:2])}{', ...' if len(places) > 2 else ''}" if places else ""
