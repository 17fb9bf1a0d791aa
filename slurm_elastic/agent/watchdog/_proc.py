"""Which processes belong to the workers, by /proc."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ProcessState", "Watched", "nearest_ancestor", "process_state"]

_DEEPEST = 64


@dataclass(frozen=True, slots=True)
class Watched:
    """A worker of the present round.

    Attributes:
        pid: its process.
        rank: its global rank.
        local_rank: its rank on this node.
        round: the number of the round.
        logs: directory for its stacks; None for no files.
    """

    pid: int
    rank: int
    local_rank: int
    round: int
    logs: Path | None


@dataclass(frozen=True, slots=True)
class ProcessState:
    """A process, from proc_pid_stat(5).

    Attributes:
        parent: its parent's id.
        state: one letter, as D for uninterruptible sleep, T for stopped, Z for ended.
        started: when, in clock ticks since boot; tells a process from a later one with the same id.
    """

    parent: int
    state: str
    started: int


def process_state(pid: int) -> ProcessState | None:
    """Return the state of a process, None if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # pid (name) state ppid ...; the name may itself hold blanks and parentheses.
    fields = text[text.rindex(b")") + 1 :].split()
    return ProcessState(int(fields[1]), fields[0].decode(), int(fields[19]))


def nearest_ancestor(pid: int, among: Collection[int]) -> int | None:
    """Return the one of these processes that this one is, or descends from; None if none."""
    for _ in range(_DEEPEST):
        if pid in among:
            return pid
        found = process_state(pid)
        if found is None or found.parent <= 1:
            return None
        pid = found.parent
    return None
