"""How the workers of a round come to stop at one step, as one node sees it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from slurm_elastic.control._membarrier import full_barrier
from slurm_elastic.control._shared_page import (
    ATTACHED,
    BOUNDARY,
    BOUNDARY_TIME,
    CHECKPOINT,
    DEADLINE,
    FENCED,
    HOLD,
    NONE,
    REGISTERED,
    SHIELDED,
    STEP,
    STOP,
    STOPPED,
    Fields,
    write_text,
)

__all__ = ["Agreement", "WorkerProgress"]


@dataclass(frozen=True, slots=True)
class WorkerProgress:
    """How far a worker has come.

    Attributes:
        local_rank: of the worker.
        attached: whether its script uses the trainer API; if not, nothing else is known.
        boundary: how many steps it has completed in this round: calls of should_stop.
        step: that the script reported last, in its own count.
        checkpoint: the step of the last checkpoint that the script reported.
        seconds_since_boundary: since the last call of should_stop, None before the first.
        stopped: whether it was told to stop.
    """

    local_rank: int
    attached: bool
    boundary: int
    step: int | None
    checkpoint: int | None
    seconds_since_boundary: float | None
    stopped: bool


class Agreement:
    """The agents agree on the step at which all workers of a round stop.

    1. Every agent calls `hold`. From then on its workers wait at the first boundary that they come to.
    2. The stop step is the maximum of the answers. Every agent calls `stop_at` with it. Workers that wait at an earlier
       boundary go on, and each stops at exactly that one.

    No worker can have passed it. `hold` sets the flag, has a full barrier executed by all workers, and reads that a
    worker has come to boundary c. If the worker did not see the flag when it came to a boundary n, then it looked
    before the barrier, so that it had written n before the barrier, too, and n is at most c. So it waits at c + 1, if
    it does not wait at c already; and the stop step is at least c + 1.

    Nobody waits for another one's boundary: workers that block in a collective because a peer of theirs waits already
    are answered for by what they had come to before.

    That holds from `hold` until `release`, however often workers are asked and whoever leads: `hold` answers the same
    until then, and what was told by `stop_at` after that.

    Args:
        pages: of the workers, by local rank; none if they could not be made.
        barrier: has a full barrier executed by the workers, given whether all of them are registered.
    """

    def __init__(self, pages: Sequence[Fields], barrier: Callable[[bool], None] = full_barrier) -> None:
        self._pages, self._barrier_of = tuple(pages), barrier
        self._earliest: int | None = None
        self._stop: int | None = None

    def hold(self) -> int | None:
        """Let the workers wait at their next boundary. Takes microseconds, at most some 10 ms; does not wait for them.

        Returns:
            The earliest boundary, counted from 1, at which all of them can stop; None, and nobody waits, if one takes
            no part: its script does not use the trainer API, or has not come to its import yet.
        """
        if self._stop is not None:
            return self._stop
        if self._earliest is None:
            if not self._pages or not all(page[ATTACHED] for page in self._pages):
                return None
            for page in self._pages:
                page[HOLD] = 1
            self._barrier()
            self._earliest = 1 + max(page[BOUNDARY] for page in self._pages)
        return self._earliest

    def release(self) -> None:
        """Give the agreement up: workers that wait go on.

        No agent may have been told a stop step by then: workers that are let go can pass it. After `stop_at` this does
        nothing.
        """
        if self._stop is None:
            self._earliest = None
            for page in self._pages:
                page[HOLD] = 0

    def stop_at(self, step: int, reason: str, seconds: float | None = None) -> None:
        """Tell the workers, which hold, where to stop. Again with the same step, it sets the remaining time only.

        Args:
            step: the boundary agreed upon: the maximum of what `hold` has returned on all nodes.
            reason: what the script is told, at most 64 bytes.
            seconds: from now until the workers are killed, None if they are given all the time they need.

        Raises:
            ValueError: the workers may be past that step, as they do not hold or as this is not the maximum; or they
                were told another one.
        """
        if self._earliest is None or step < self._earliest or self._stop not in (None, step):
            raise ValueError(f"cannot stop at {step}: told {self._stop}, earliest {self._earliest}")
        deadline = NONE if seconds is None else time.monotonic_ns() + int(seconds * 1e9)
        for page in self._pages:
            page[DEADLINE] = deadline
            if self._stop is None:
                write_text(page, reason)
        if self._stop is None:
            # Whoever sees the step sees the rest; processors that reorder stores need that.
            self._barrier()
            self._stop = step
            for page in self._pages:
                page[STOP] = step

    def stopped(self) -> bool:
        """Return whether every worker was told to stop, by its own question; it may still be saving."""
        return bool(self._pages) and all(page[STOPPED] for page in self._pages)

    def shielded(self) -> bool:
        """Return whether SIGTERM has no effect on any worker."""
        return bool(self._pages) and all(page[SHIELDED] for page in self._pages)

    def fence(self) -> None:
        """From now on no worker may publish a checkpoint: another group may be training."""
        for page in self._pages:
            page[FENCED] = 1

    def progress(self) -> tuple[WorkerProgress, ...]:
        """How far the workers have come, by local rank; from any thread."""
        now = time.monotonic_ns()
        return tuple(_progress(rank, page, now) for rank, page in enumerate(self._pages))

    def _barrier(self) -> None:
        self._barrier_of(all(page[REGISTERED] for page in self._pages))


def _progress(local_rank: int, page: Fields, now: int) -> WorkerProgress:
    boundary, step, checkpoint, at = page[BOUNDARY], page[STEP], page[CHECKPOINT], page[BOUNDARY_TIME]
    return WorkerProgress(
        local_rank=local_rank,
        attached=bool(page[ATTACHED]),
        boundary=boundary,
        step=None if step == NONE else step,
        checkpoint=None if checkpoint == NONE else checkpoint,
        seconds_since_boundary=max(0, now - at) / 1e9 if boundary else None,
        stopped=bool(page[STOPPED]),
    )
