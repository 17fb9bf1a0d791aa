"""The timers that run at this moment. No clock, no I/O."""

from __future__ import annotations

from dataclasses import dataclass, replace

from slurm_elastic.agent.watchdog._timer_protocol import Request

_MOST = 10_000
"""Timers of one node at a time. A script has a few; more are a mistake or an attack."""


@dataclass(frozen=True, slots=True)
class Timer:
    """One timer that was acquired and not released.

    Attributes:
        request: The client's request.
        worker: The process id of the worker that the client is, or descends from.
        started: The start time of the client's process, see `ProcessState`.
        acquired, expires: The agent's own monotonic time in seconds.
        steps: The number of steps that the worker has taken in its round, if the timer stands for its next step; None
            for a client's timer.
    """

    request: Request
    worker: int
    started: int
    acquired: float
    expires: float
    steps: int | None = None


class Timers:
    """Timers by process and scope."""

    def __init__(self) -> None:
        self._timers: dict[tuple[int, str], Timer] = {}

    def __len__(self) -> int:
        return len(self._timers)

    def acquire(self, timer: Timer) -> bool:
        """Start a timer, or restart it; return False if there are too many."""
        key = (timer.request.pid, timer.request.scope)
        if len(self._timers) >= _MOST and key not in self._timers:
            return False
        self._timers[key] = timer
        return True

    def release(self, request: Request) -> None:
        """Remove a timer, if it runs."""
        self._timers.pop((request.pid, request.scope), None)

    def postpone(self, seconds: float) -> None:
        """Move the expiry of all timers by `seconds`."""
        self._timers = {key: replace(timer, expires=timer.expires + seconds) for key, timer in self._timers.items()}

    def clear(self) -> None:
        """Remove all timers."""
        self._timers.clear()

    def take_expired(self, now: float) -> list[Timer]:
        """Remove the timers that have expired, and return them in order of expiry."""
        expired = sorted((timer for timer in self._timers.values() if timer.expires <= now), key=lambda t: t.expires)
        for timer in expired:
            self.release(timer.request)
        return expired

    def next_expiry(self) -> float | None:
        """Return the time at which the next timer expires; None if none runs."""
        return min((timer.expires for timer in self._timers.values()), default=None)
