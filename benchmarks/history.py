"""What the workers of :mod:`benchmarks.scripts` wrote down."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Worker:
    """One worker process; times in seconds since 1970."""

    node: str
    rank: int
    world: int
    started: float
    steps: tuple[float, ...]
    reached: Mapping[str, float] = field(default_factory=dict)
    """When it had come so far, where the script tells."""
    numbers: tuple[int, ...] = ()
    """Of the steps over the whole training, where the script tells."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """What an event cost, in seconds.

    Attributes:
        table: from the event until the last node had started its worker of the new round.
        gap: between the last step before and the first step after.
        imports: of the gap, from that start until the last worker has imported what it needs; 0 if scripts do not tell.
        own: of the gap, from then to the first step.
        lost: steps taken twice; 0 if scripts do not tell.
    """

    table: float
    gap: float
    imports: float = 0.0
    own: float = 0.0
    lost: int = 0


def read(directory: Path) -> list[Worker]:
    """All workers that have begun."""
    workers = []
    for path in directory.glob("*.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        if lines:
            first, *rest = lines
            steps = tuple(line["step"] for line in rest if "step" in line)
            numbers = tuple(line["number"] for line in rest if "number" in line)
            reached = {line["reached"]: line["at"] for line in rest if "reached" in line}
            place = (first["node"], first["rank"], first["world"])
            workers.append(Worker(*place, first["started"], steps, reached, numbers))
    return workers


def recovery(workers: Sequence[Worker], event: float, nodes: int) -> Recovery | None:
    """What an event cost that left this many nodes; None while they do not train again.

    If they had to start more than once, the last start counts.
    """
    # The kernel counts the start of a process in hundredths of a second, downwards.
    old = [worker for worker in workers if worker.started < event - 0.02]
    new = {
        worker.node: worker
        for worker in sorted(workers, key=lambda worker: worker.started)
        if worker not in old and worker.world == nodes and worker.steps
    }
    before = [worker.steps[-1] for worker in old if worker.steps]
    if len(new) < nodes or not before:
        return None
    first_step, started = min(each.steps[0] for each in new.values()), max(each.started for each in new.values())
    imported = max(each.reached.get("imported", started) for each in new.values())
    last = max((worker.numbers[-1] for worker in old if worker.numbers), default=0)
    first = min((worker.numbers[0] for worker in new.values() if worker.numbers), default=last + 1)
    return Recovery(
        started - event, first_step - max(before), max(0.0, imported - started), first_step - imported, last + 1 - first
    )
