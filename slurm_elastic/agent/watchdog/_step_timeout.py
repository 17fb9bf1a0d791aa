"""The time after which a worker without a step counts as hung. No clock, no I/O."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from slurm_elastic.control import WorkerProgress
from slurm_elastic.errors import UsageError

__all__ = ["HangTimeout", "StepWatch", "Stuck", "hang_timeout"]

_LEAST_AUTO = 300.0
_TIMES_LONGEST = 10.0
_STEPS_BEFORE_AUTO = 10


@dataclass(frozen=True, slots=True)
class HangTimeout:
    """The longest time that a worker may go without a step.

    Attributes:
        seconds: the time; None for ten times the longest time between two steps so far, at least five minutes.
    """

    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Stuck:
    """A worker that takes no step any more.

    Attributes:
        local_rank: of the worker.
        boundary: how many steps it has taken in this round.
        step: the last one by the script's own count, if it tells.
        seconds: since then.
    """

    local_rank: int
    boundary: int
    step: int | None
    seconds: float


def hang_timeout(text: str | None) -> HangTimeout | None:
    """Read ``--hang-timeout``: seconds, ``auto``, or ``off``, which is also what it is when not given.

    Raises:
        UsageError: it is none of these.
    """
    if text is None or text == "off":
        return None
    if text == "auto":
        return HangTimeout()
    if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,6})?", text) or float(text) <= 0:
        raise UsageError(f"--hang-timeout {text!r} is neither seconds, above 0, nor auto or off; write it as in 600")
    return HangTimeout(float(text))


class StepWatch:
    """The steps of the workers of one node, for all rounds.

    A worker is watched from its first step on, if its script asks `slurm_elastic.trainer.should_stop` after every step,
    until it is told to stop.
    """

    def __init__(self, timeout: HangTimeout) -> None:
        self._timeout = timeout
        self._longest = 0.0
        self._taken = 0
        self._before: dict[int, tuple[int, float]] = {}
        self._told: set[tuple[int, int]] = set()
        self._still: list[tuple[float, float]] = []

    def begin(self) -> None:
        """Another round: its workers count their steps anew."""
        self._before.clear()
        self._told.clear()
        self._still.clear()

    def put_off(self, seconds: float, now: float) -> None:
        """Do not count so many seconds, up to now: the watchdog stood still, and perhaps the workers did, too."""
        self._still.append((now, seconds))

    def look(self, progress: Sequence[WorkerProgress], now: float) -> tuple[list[Stuck], float]:
        """Look at the workers.

        Args:
            progress: how far they are.
            now: own monotonic time.

        Returns:
            Those that hang and were not returned before, and after how many seconds to look again at the latest.
        """
        limit = self._limit()
        stuck, left = [], [limit]
        for worker in progress:
            since = self._since(worker, now)
            if since is None or worker.stopped or (worker.local_rank, worker.boundary) in self._told:
                continue
            if since < limit:
                left.append(limit - since)
                continue
            self._told.add((worker.local_rank, worker.boundary))
            stuck.append(Stuck(worker.local_rank, worker.boundary, worker.step, since))
        if not stuck:
            # What hangs is no measure of how long a step may take.
            self._learn(progress, now)
        return stuck, min(left)

    def _since(self, worker: WorkerProgress, now: float) -> float | None:
        """Return the seconds since its last step, without those in which the watchdog stood still."""
        since = worker.seconds_since_boundary
        if since is None:
            return None
        return max(0.0, since - sum(seconds for until, seconds in self._still if until > now - since))

    def _limit(self) -> float:
        if self._timeout.seconds is not None:
            return self._timeout.seconds
        if self._taken < _STEPS_BEFORE_AUTO:
            return float("inf")
        return max(_LEAST_AUTO, _TIMES_LONGEST * self._longest)

    def _learn(self, progress: Sequence[WorkerProgress], now: float) -> None:
        if self._timeout.seconds is not None:
            return
        # A clock that stands still when the watchdog does.
        awake = now - sum(seconds for _, seconds in self._still)
        for worker in progress:
            since = self._since(worker, now)
            if since is None:
                continue
            boundary, at = self._before.get(worker.local_rank, (0, awake - since))
            taken = worker.boundary - boundary
            if taken:
                # Steps between two looks took so long on average; a long one among them was seen while it lasted.
                self._longest = max(self._longest, (awake - since - at) / taken)
                self._taken += taken
                self._before[worker.local_rank] = (worker.boundary, awake - since)
            self._longest = max(self._longest, since)
