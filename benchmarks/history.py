"""What the workers of :mod:`benchmarks.training` wrote down."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Recovery", "Worker", "read", "recovery"]


@dataclass(frozen=True, slots=True)
class Worker:
    """One worker process; times in seconds since 1970."""

    node: str
    rank: int
    world: int
    started: float
    steps: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Recovery:
    """What an event cost, in seconds.

    Attributes:
        table: from the event until the last node had started its worker of the new round.
        gap: between the last step before and the first step after.
    """

    table: float
    gap: float


def read(directory: Path) -> list[Worker]:
    """All workers that have begun."""
    workers = []
    for path in directory.glob("*.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        if lines:
            first, *rest = lines
            steps = tuple(line["step"] for line in rest)
            workers.append(Worker(first["node"], first["rank"], first["world"], first["started"], steps))
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
    first_step = min(worker.steps[0] for worker in new.values())
    return Recovery(max(worker.started for worker in new.values()) - event, first_step - max(before))
