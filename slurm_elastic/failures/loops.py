"""Loops: a run that goes round in circles, as its events tell, and what a person can do. Pure functions.

None of them ends a run. Times are by the clocks of nodes, so none is compared that is less than a minute apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

History = Sequence[tuple[float, Mapping[str, Any]]]
"""Events and progress of a run, in the order of their times, each with its time in seconds since 1970."""

_ROUNDS_WITHOUT = 5
_FACTOR = 4.0
_LEAST_WITHOUT = 2 * 3600.0
_COMEBACKS = 4
_FLAPPING_WINDOW = 6 * 3600.0
_CHANGES = 4
_LEADER_WINDOW = 3600.0


@dataclass(frozen=True, slots=True)
class Loop:
    """Something that repeats without getting the run on.

    Attributes:
        loop: ``no_checkpoint``, ``node_flapping`` or ``leader_changes``.
        text: One line.
        advice: What a person can do.
        since: Seconds since 1970 at which it began.
        nodes: The nodes that it is about.
    """

    loop: str
    text: str
    advice: str
    since: float
    nodes: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """A name that is the same as long as it goes on, at most for a day."""
        return ".".join((self.loop, *self.nodes, str(int(self.since // 86400))))


def find_loops(history: Iterable[tuple[float, Mapping[str, Any]]], now: float) -> tuple[Loop, ...]:
    """Return all loops.

    Args:
        history: Events and progress, in any order.
        now: Seconds since 1970.
    """
    ordered = sorted(history, key=lambda event: event[0])
    return tuple(loop for detector in DETECTORS for loop in detector(ordered, now))


def without_checkpoint(history: History, now: float) -> tuple[Loop, ...]:
    """Find that no checkpoint has got further in five rounds that failures or losses have ended, or for long.

    Long is four times the longest training between two checkpoints before, at least two hours. Only time counts in
    which a round ran. Without any checkpoint on record steps count instead, and rounds only.
    """
    reports = [(time, event, *_reached(event)) for time, event in history]
    saves = any(checkpoint is not None for _, _, checkpoint, _ in reports)
    best: int | None = None
    since, rounds, running, trained, longest = 0.0, 0, None, 0.0, 0.0
    for time, event, checkpoint, step in reports:
        mark = checkpoint if saves else step
        match event:
            case {"event": "round_formed"}:
                running = time
                since = since or time
            case {"event": "round_ended" | "run_ended"}:
                trained += 0.0 if running is None else time - running
                running = None
                rounds += event.get("reason") in ("worker_failed", "node_lost")
        if mark is not None and (best is None or mark > best):
            trained += 0.0 if running is None else time - running
            longest = max(longest, trained if best is not None else 0.0)
            best, since, rounds, trained = mark, time, 0, 0.0
            running = None if running is None else time
    trained += 0.0 if running is None else now - running
    what = f"checkpoint after step {best}" if saves else "step" if best is None else f"step after {best}"
    hours = trained / 3600
    if best is not None and rounds >= _ROUNDS_WITHOUT:
        text = f"no new {what} in {rounds} rounds that failures or losses have ended"
        advice = "look at the failures (slurm-elastic logs --errors), and save more often than rounds end"
        return (Loop("no_checkpoint", text, advice, since),)
    if saves and longest and trained > max(_LEAST_WITHOUT, _FACTOR * longest):
        text = f"no new {what} in {hours:.1f} h of training; before, one came within {longest / 3600:.1f} h"
        advice = "see whether steps go on and whether rank 0 can write (slurm-elastic status, top)"
        return (Loop("no_checkpoint", text, advice, since),)
    return ()


def flapping_nodes(history: History, now: float) -> tuple[Loop, ...]:
    """Find nodes that were lost, or failed their check, and joined again four times within six hours."""
    away: set[str] = set()
    comebacks: dict[str, list[float]] = {}
    for time, event in history:
        match event:
            case {"event": "node_lost" | "node_check_failed", "nodes": [*names]}:
                away.update(name for name in names if isinstance(name, str))
            case {"event": "round_formed", "nodes": [*names]}:
                back = away.intersection(name for name in names if isinstance(name, str))
                away -= back
                for name in back:
                    comebacks.setdefault(name, []).append(time)
    loops = []
    for node, times in sorted(comebacks.items()):
        recent = [time for time in times if now - time < _FLAPPING_WINDOW]
        if len(recent) >= _COMEBACKS:
            text = f"{node} was lost and has joined again {len(recent)} times in {_FLAPPING_WINDOW / 3600:.0f} h"
            advice = f"leave it out (sbatch --exclude={node}), and look at its network, memory and kernel log"
            loops.append(Loop("node_flapping", text, advice, recent[0], (node,)))
    return tuple(loops)


def leader_changes(history: History, now: float) -> tuple[Loop, ...]:
    """Find that the leader was lost and another one has followed four times within an hour."""
    lost = [
        (time, name)
        for time, event in history
        if event.get("event") == "leader_changed" and now - time < _LEADER_WINDOW
        for name in _names(event)[:1]
    ]
    if len(lost) < _CHANGES:
        return ()
    nodes = tuple(sorted({name for _, name in lost}))
    shown = ", ".join(nodes[:4]) + (", ..." if len(nodes) > 4 else "")
    text = f"the leader has changed {len(lost)} times in an hour; lost on {shown}"
    advice = "choose a node that is not overloaded by --leader-node, or let slurm-elastic coordinator lead elsewhere"
    return (Loop("leader_changes", text, advice, lost[0][0]),)


DETECTORS = (without_checkpoint, flapping_nodes, leader_changes)


def _names(event: Mapping[str, Any]) -> list[str]:
    names = event.get("nodes")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _reached(event: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Return the newest checkpoint and the newest step that a record of progress has."""
    if event.get("event") == "progress":
        workers: object = [event]
    else:
        workers = event.get("workers") if event.get("event") == "workers_ended" else None
    records = [record for record in workers if isinstance(record, Mapping)] if isinstance(workers, list) else []
    checkpoints, steps = (
        [value for record in records if type(value := record.get(name)) is int] for name in ("checkpoint", "step")
    )
    return max(checkpoints, default=None), max(steps, default=None)
