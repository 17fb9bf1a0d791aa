"""What the elastic agent tells about itself. Its main loop speaks, the health port's thread asks."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from slurm_elastic.agent.health._state import Place, Snapshot, Stage, enter

__all__ = ["Reporter"]

_FRESH = 1.0
"""Seconds for which a sign of life of the main loop is new enough."""


class Reporter:
    """The agent's present state, and the question whether its main loop lives.

    The main loop sleeps until something happens, so a long silence says nothing. It is asked, by `fd`, when somebody
    wants to know and its last sign is old; how long it has not answered is its silence.

    Args:
        snapshot: to begin with.

    Attributes:
        fd: readable when the main loop is asked; for use in a selector.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.Lock()
        self._snapshot = snapshot
        self._answered_at = time.monotonic()
        self._asked_at: float | None = None
        self._quiet = False

    @property
    def snapshot(self) -> Snapshot:
        """The present state; a value that does not change."""
        return self._snapshot

    # What the main loop says.

    def answer(self) -> None:
        """The main loop lives. Costs next to nothing, unless it was asked."""
        if self._asked_at is not None:
            with self._lock, contextlib.suppress(BlockingIOError):
                os.eventfd_read(self.fd)
                self._asked_at = None
        self._answered_at = time.monotonic()

    def enter(self, stage: Stage) -> None:
        """It begins something else."""
        self._change(lambda snapshot: enter(snapshot, stage, time.monotonic()))

    def join(self) -> None:
        """It has no workers any more, and joins."""
        now = time.monotonic()
        self._change(lambda snapshot: enter(_without_workers(snapshot), Stage.JOINING, now))

    def train(self, place: Place, restarts: int) -> None:
        """The workers of a round run."""
        now = time.monotonic()
        self._change(
            lambda snapshot: enter(
                replace(snapshot, place=place, restarts=restarts, counted=False), Stage.TRAINING, now
            )
        )

    def count(self, steps: int) -> None:
        """The round is over, and its workers here have taken so many steps."""
        self._change(
            lambda snapshot: (
                snapshot if snapshot.counted else replace(snapshot, steps=snapshot.steps + steps, counted=True)
            )
        )

    def notice(self, reason: str) -> None:
        """It was told that it has to go."""
        self._change(lambda snapshot: replace(snapshot, notices=(*snapshot.notices, reason)))

    def hung(self, killed: bool) -> None:
        """The watchdog found a worker that hangs. From any thread."""
        self._change(lambda snapshot: replace(snapshot, hangs=snapshot.hangs + 1, kills=snapshot.kills + int(killed)))

    def over(self) -> None:
        """The main loop has ended as it should, and answers no more."""
        with self._lock:
            self._quiet = True
            self._asked_at = None

    def close(self) -> None:
        """Nobody asks any more."""
        self.over()
        with self._lock:
            os.close(self.fd)

    # What the server asks.

    def silence(self) -> float:
        """Ask the main loop for a sign of life, and return for how many seconds it has owed one."""
        with self._lock:
            now = time.monotonic()
            if self._quiet:
                return 0.0
            if self._asked_at is None and now - self._answered_at > _FRESH:
                self._asked_at = now
                os.eventfd_write(self.fd, 1)
            return 0.0 if self._asked_at is None else now - self._asked_at

    def _change(self, change: Callable[[Snapshot], Snapshot]) -> None:
        with self._lock:
            self._snapshot = change(self._snapshot)


def _without_workers(snapshot: Snapshot) -> Snapshot:
    place = snapshot.place
    return snapshot if place is None else replace(snapshot, place=replace(place, workers=()))
