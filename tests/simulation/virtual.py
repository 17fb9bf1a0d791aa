"""Virtual time, and processes in it that exist or not and may do nothing for a while."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class Time:
    """What happens at which moment.

    Attributes:
        now: the moment.
        transcript: what happened, if it is wanted.
    """

    def __init__(self, transcript: list[str] | None) -> None:
        self.now = 0.0
        self.transcript = transcript
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0

    def at(self, moment: float, action: Callable[..., None], *arguments: Any) -> None:
        """Do something at a moment."""
        self._count += 1
        heapq.heappush(self._heap, (moment, self._count, action, arguments))

    def play(self, until: float) -> None:
        """Let time pass."""
        heap = self._heap
        while heap and heap[0][0] <= until:
            self.now, _, action, arguments = heapq.heappop(heap)
            action(*arguments)
        self.now = max(self.now, until)

    def tell(self, who: str, what: object) -> None:
        """Add a line to the transcript."""
        if self.transcript is not None:
            self.transcript.append(f"{self.now:9.3f}  {who:22} {what}")


class Process:
    """One process.

    Attributes:
        alive: whether it exists.
        paused: whether it does nothing for a while.
    """

    def __init__(self, time: Time) -> None:
        self._time = time
        self.alive, self.paused = True, False
        self._postponed: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    def later(self, seconds: float, action: Callable[..., None], *arguments: Any) -> None:
        """Do something in a while, if the process still exists; after a pause if it is paused."""
        self._time.at(self._time.now + seconds, self.do, action, *arguments)

    def do(self, action: Callable[..., None], *arguments: Any) -> None:
        """Do something now, if the process still exists; after a pause if it is paused."""
        if self.alive and self.paused:
            self._postponed.append((action, arguments))
        elif self.alive:
            action(*arguments)

    def pause(self) -> None:
        """Do nothing any more."""
        self.paused = True

    def go_on(self) -> None:
        """Do what was postponed, and go on."""
        self.paused = False
        postponed, self._postponed = self._postponed, []
        for action, arguments in postponed:
            self.do(action, *arguments)
