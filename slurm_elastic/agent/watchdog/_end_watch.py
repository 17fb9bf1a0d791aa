"""Tells when some workers of a round have ended and others have not. No clock, no I/O.

A worker that never ends, such as one that joins a thread for ever, holds up a run without a word.
"""

from __future__ import annotations

import enum

STACKS_AFTER = 60.0
_SAID_AFTER = 10.0
_WATCHED_AFTER = 60.0


class Said(enum.Enum):
    """A line about the ends of workers."""

    SOME_ENDED = enum.auto()
    """Some workers of this node ended a while ago."""
    ALL_ENDED = enum.auto()
    """All workers of this node ended a while ago, and the round is not over."""
    STACKS = enum.auto()
    """The stacks of those that still run are wanted."""
    UNWATCHED = enum.auto()
    """``--hang-timeout`` watches no worker of this node."""


class EndWatch:
    """The ends of the workers of one node; each thing is told once in a round.

    Args:
        stacks_after: Seconds from the first end to the stacks of workers that still run.
        watches_steps: True if ``--hang-timeout`` is given.
    """

    def __init__(self, stacks_after: float, *, watches_steps: bool) -> None:
        self._stacks_after, self._watches_steps = stacks_after, watches_steps
        self.begin()

    def begin(self) -> None:
        """Begin a round."""
        self._began: float | None = None
        self._ended: float | None = None
        self._said: set[Said] = set()

    def check(self, workers: int, living: int, *, watched: bool, now: float) -> list[Said]:
        """Return what is to be told now.

        Args:
            workers: The number of workers of this node.
            living: Those of them that have not ended.
            watched: True if one of them has used `slurm_elastic.trainer`.
            now: The agent's own monotonic time in seconds.
        """
        self._began = now if self._began is None else self._began
        if living < workers and self._ended is None:
            self._ended = now
        due = set()
        if self._watches_steps and not watched and living and now - self._began >= _WATCHED_AFTER:
            due.add(Said.UNWATCHED)
        if self._ended is not None and now - self._ended >= _SAID_AFTER:
            due.add(Said.SOME_ENDED if living else Said.ALL_ENDED)
        if self._ended is not None and living and now - self._ended >= self._stacks_after:
            due.add(Said.STACKS)
        new = due - self._said
        self._said |= due
        return sorted(new, key=lambda said: said.value)
