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
    least, most = min(worker.steps for worker in positions), max(worker.steps for worker in positions)
    behind, awaited = _by_collectives(positions)
    waited_for = f" ({awaited.operation}, number {awaited.number})" if awaited is not None else ""
    if least < most:
        slow = [worker for worker in positions if worker.steps == least]
        into = f"; they wait in a collective{waited_for}" if awaited is not None else ""
        return _named(slow, f"behind: {least} steps in this round, others {most}{into}")
    absent = behind or [worker for worker in positions if worker.in_collective is False]
    if behind or (absent and any(worker.in_collective for worker in positions)):
        after = f", after {least} steps" if least else ""
        return _named(absent, f"not in the collective that others wait in{waited_for}{after}")
    return Stragglers((), f"no worker is behind: {least} steps in this round everywhere" if least else "")


def _by_collectives(positions: Sequence[WorkerPosition]) -> tuple[list[WorkerPosition], Collective | None]:
    """Return the workers that have begun fewer collectives of a group than others, and the next one of that group.

    A worker may be behind in one group because it waits in another one: those that wait nowhere come first.
    """
    for group in dict.fromkeys(call.group for worker in positions for call in worker.collectives):
        last = {worker.rank: call for worker in positions for call in worker.collectives if call.group == group}
        least = min(call.number for call in last.values())
        ahead = [call for call in last.values() if call.number > least]
        if not ahead:
            continue
        behind = [worker for worker in positions if worker.rank in last and last[worker.rank].number == least]
        outside = [worker for worker in behind if worker.in_collective is not True]
        if outside or not any(worker.in_collective is False for worker in positions):
            return outside or behind, min(ahead, key=lambda call: call.number)
    return [], None


def _mismatch(positions: Sequence[WorkerPosition]) -> str:
    """Say which workers have begun different collectives with the same number; empty if none have."""
    for group in dict.fromkeys(call.group for worker in positions for call in worker.collectives):
        ordered = sorted(positions, key=lambda worker: worker.rank)
        begun = [(worker, call) for worker in ordered for call in worker.collectives if call.group == group]
        number = max(call.number for _, call in begun)
        newest = [
            (worker, call) for worker, call in begun if call.number == number and worker.in_collective is not False
        ]
        common = Counter(call.operation for _, call in newest).most_common()
        if len(common) > 1:
            usual = common[0][0]
            others = [worker for worker, call in newest if call.operation != usual]
            operation = next(call.operation for worker, call in newest if worker is others[0])
            what = f"in {operation}, and others in {usual}, both number {number} of their process group"
            places = _places([next(worker for worker, call in newest if call.operation == usual), *others])
            return f"{_subject(others)} {what}: the script calls different collectives{places}"
    return ""


def _named(some: Sequence[WorkerPosition], what: str) -> Stragglers:
    return Stragglers(tuple(sorted(worker.rank for worker in some)), f"{_subject(some)} {what}{_places(some)}")


def _subject(some: Sequence[WorkerPosition]) -> str:
    ranks = sorted(worker.rank for worker in some)
    shown = ", ".join(str(rank) for rank in ranks[:_SHOWN]) + (", ..." if len(ranks) > _SHOWN else "")
    return f"ranks {shown} are" if len(ranks) > 1 else f"rank {shown} is"


def _places(some: Sequence[WorkerPosition]) -> str:
    places = sorted({worker.place for worker in some if worker.place})
    return f"; at {', '.join(places[:2])}{', ...' if len(places) > 2 else ''}" if places else ""
