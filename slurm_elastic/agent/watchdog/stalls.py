"""Finds workers that take no step any more. No clock, no I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from slurm_elastic.agent.option_values import positive_seconds
from slurm_elastic.control import WorkerProgress
from slurm_elastic.errors import UsageError

_SHORTEST_AUTO = 300.0
_AUTO_FACTOR = 10.0
_STEPS_BEFORE_AUTO = 10


@dataclass(frozen=True, slots=True)
class HangTimeout:
    """The longest time that a worker may go without a step.

    Attributes:
        seconds: The time; None for ten times the longest time between two steps so far, at least 300 s.
        first: The time from its start to its first step, in which it imports, connects and loads.
    """

    seconds: float | None = None
    first: float = 1800.0


def hang_timeout(text: str | None, first: str | None = None) -> HangTimeout | None:
    """Parse ``--hang-timeout``: seconds, ``auto``, or ``off``, the default; and ``--first-step-timeout``: seconds.

    Raises:
        UsageError: A text is none of these.
    """
    if text is None or text == "off":
        if first:
            raise UsageError("--first-step-timeout needs --hang-timeout")
        return None
    timeout = HangTimeout()
    if text != "auto":
        timeout = replace(timeout, seconds=positive_seconds("--hang-timeout", text, "nor auto or off"))
    return replace(timeout, first=positive_seconds("--first-step-timeout", first)) if first else timeout


class StepWatch:
    """The steps of the workers of one node, for all rounds.

    A worker whose script calls `slurm_elastic.trainer.should_stop` after every step is watched until it is asked to
    stop.
    """

    def __init__(self, timeout: HangTimeout) -> None:
        self._timeout = timeout
        self._longest = 0.0
        self._taken = 0
        self._last_steps: dict[int, tuple[int, float]] = {}
        self._returned: set[tuple[int, int]] = set()
        self._pauses: list[tuple[float, float]] = []
        self._began: float | None = None

    def begin(self) -> None:
        """Begin a round, in which workers count their steps from 0."""
        self._last_steps.clear()
        self._returned.clear()
        self._pauses.clear()
        self._began = None

    def postpone(self, seconds: float, now: float) -> None:
        """Subtract the last `seconds` before `now`: the watchdog was paused, and perhaps the workers, too."""
        self._pauses.append((now, seconds))

    def check(self, progress: Sequence[WorkerProgress], now: float) -> tuple[list[tuple[WorkerProgress, float]], float]:
        """Find workers that take no step any more.

        Args:
            now: The agent's own monotonic time in seconds.

        Returns:
            Those that hang and were not returned before, each with the seconds since its last step, and after how many
            seconds to check again at the latest.
        """
        self._began = now if self._began is None else self._began
        steady = self._limit()
        stalled, left = [], [steady]
        for worker in progress:
            since, limit = self._since(worker, now), steady
            if since is None and worker.attached:
                since, limit = self._awake(now - self._began, now), self._timeout.first
            if since is None or worker.stopped or (worker.local_rank, worker.boundary) in self._returned:
                continue
            if since < limit:
                left.append(limit - since)
                continue
            self._returned.add((worker.local_rank, worker.boundary))
            stalled.append((worker, since))
        if not stalled:
            # The time of a worker that hangs says nothing about the duration of steps.
            self._learn(progress, now)
        return stalled, min(left)

    def _since(self, worker: WorkerProgress, now: float) -> float | None:
        """Return the seconds since a worker's last step, without those in which the watchdog was paused."""
        return None if worker.seconds_since_boundary is None else self._awake(worker.seconds_since_boundary, now)

    def _awake(self, since: float, now: float) -> float:
        return max(0.0, since - sum(seconds for until, seconds in self._pauses if until > now - since))

    def _limit(self) -> float:
        if self._timeout.seconds is not None:
            return self._timeout.seconds
        if self._taken < _STEPS_BEFORE_AUTO:
            return float("inf")
        return max(_SHORTEST_AUTO, _AUTO_FACTOR * self._longest)

    def _learn(self, progress: Sequence[WorkerProgress], now: float) -> None:
        if self._timeout.seconds is not None:
            return
        # A clock that stops while the watchdog is paused.
        awake = now - sum(seconds for _, seconds in self._pauses)
        for worker in progress:
            since = self._since(worker, now)
            if since is None:
                continue
            boundary, at = self._last_steps.get(worker.local_rank, (0, awake - since))
            taken = worker.boundary - boundary
            if taken:
                # Steps between two looks took so long on average; a long one among them was seen while it lasted.
                self._longest = max(self._longest, (awake - since - at) / taken)
                self._taken += taken
                self._last_steps[worker.local_rank] = (worker.boundary, awake - since)
            self._longest = max(self._longest, since)
