"""The workers of a round, and the states and ancestors of processes by /proc."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

_DEEPEST = 64


@dataclass(frozen=True, slots=True)
class Watched:
    """A worker of the present round.

    Attributes:
        pid: Its process id.
        rank: Its global rank.
        local_rank: Its rank on this node.
        round: The number of the round.
        logs: The directory for its stacks; None for no files.
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
        parent: The process id of its parent.
        state: One letter, such as D for uninterruptible sleep, T for stopped, Z for ended.
        started: Its start in clock ticks since boot, which differs from that of a later process with the same id.
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
    """Return the process among these that `pid` is, or descends from; None if there is none."""
    for _ in range(_DEEPEST):
        if pid in among:
            return pid
        state = process_state(pid)
        if state is None or state.parent <= 1:
            return None
        pid = state.parent
    return None
