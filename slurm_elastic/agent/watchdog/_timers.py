"""The timers that run at this moment. No clock, no I/O."""

from __future__ import annotations

from dataclasses import dataclass, replace

from slurm_elastic.agent.watchdog._timer_protocol import Request

__all__ = ["Timer", "Timers"]

_MOST = 10_000
"""A script has a few timers at a time; more are a mistake, or meant badly."""


@dataclass(frozen=True, slots=True)
class Timer:
    """One timer that was acquired and not released.

    Attributes:
        request: what the client asked for.
        worker: process id of the worker that the client is, or descends from.
        started: see `ProcessState`, of the client.
        acquired, expires: own monotonic time in seconds.
        steps: for the pause after a step, how many the worker has taken in its round; None for what a client asks for.
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
        """Start a timer, or start it anew. Returns False if there are too many."""
        key = (timer.request.pid, timer.request.scope)
        if len(self._timers) >= _MOST and key not in self._timers:
            return False
        self._timers[key] = timer
        return True

    def release(self, request: Request) -> None:
        """Forget a timer, if there is such."""
        self._timers.pop((request.pid, request.scope), None)

    def put_off(self, seconds: float) -> None:
        """Let all expire so much later."""
        self._timers = {key: replace(timer, expires=timer.expires + seconds) for key, timer in self._timers.items()}

    def clear(self) -> None:
        """Forget all."""
        self._timers.clear()

    def take_expired(self, now: float) -> list[Timer]:
        """Return the timers that have expired, first ones first, and forget them."""
        expired = sorted((timer for timer in self._timers.values() if timer.expires <= now), key=lambda t: t.expires)
        for timer in expired:
            self.release(timer.request)
        return expired

    def next_expiry(self) -> float | None:
        """When the next timer expires, None if none runs."""
        return min((timer.expires for timer in self._timers.values()), default=None)
