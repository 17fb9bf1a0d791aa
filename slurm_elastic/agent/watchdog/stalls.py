"""Finds workers that take no step any more. No clock, no I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from slurm_elastic.agent.option_values import positive_seconds
from slurm_elastic.control.agent_side import WorkerProgress
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
        self._returned: set[tuple[int, int]] = set()
        self._steps: dict[int, tuple[int, float]] = {}
        """The steps of each worker, by local rank, and the time of the last one, or that when it was first seen."""
        self._checked_at = float("-inf")

    def begin(self) -> None:
        """Begin a round, in which workers count their steps from 0."""
        self._returned.clear()
        self._steps.clear()
        self._checked_at = float("-inf")

    def check(self, progress: Sequence[WorkerProgress], now: float) -> tuple[list[tuple[WorkerProgress, float]], float]:
        """Find workers that take no step any more.

        Args:
            now: Monotonic time in seconds, which stops while the watchdog is paused, as the workers may be, too.

        Returns:
            Those that hang and were not returned before, each with the seconds since its last step, and after how many
            seconds to check again at the latest.
        """
        steady = self._limit()
        stalled, left, longest = [], [steady], 0.0
        for worker in progress:
            since = now - self._last_step(worker, now)
            limit = steady if worker.boundary else self._timeout.first
            longest = max(longest, since) if worker.boundary else longest
            if not worker.attached or worker.stopped or (worker.local_rank, worker.boundary) in self._returned:
                continue
            if since < limit:
                left.append(limit - since)
                continue
            self._returned.add((worker.local_rank, worker.boundary))
            stalled.append((worker, since))
        self._checked_at = now
        if not stalled:
            # The time of a worker that hangs says nothing about the duration of steps.
            self._longest = max(self._longest, longest)
        return stalled, min(left)

    def _last_step(self, worker: WorkerProgress, now: float) -> float:
        """Return when the worker has taken its last step, or was first seen if it has taken none."""
        steps, last = self._steps.get(worker.local_rank, (0, now))
        before = last
        if worker.seconds_since_boundary is not None:
            # No new step was earlier than the last check: what the worker's own clock has on top was a pause.
            earliest = last if worker.boundary == steps else self._checked_at
            last = max(now - worker.seconds_since_boundary, earliest)
        if worker.boundary > steps:
            self._taken += worker.boundary - steps
            if steps:
                # Steps between two checks took so long on average; a long one among them was seen while it lasted.
                self._longest = max(self._longest, (last - before) / (worker.boundary - steps))
        self._steps[worker.local_rank] = worker.boundary, last
        return last

    def _limit(self) -> float:
        if self._timeout.seconds is not None:
            return self._timeout.seconds
        if self._taken < _STEPS_BEFORE_AUTO:
            return float("inf")
        return max(_SHORTEST_AUTO, _AUTO_FACTOR * self._longest)
