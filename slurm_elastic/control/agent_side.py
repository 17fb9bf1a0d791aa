"""The agent's side of the control pages: the step at which all workers of a round stop, their progress, the fence."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from slurm_elastic.control import shared_page as page
from slurm_elastic.control.worker_side import VARIABLE
from slurm_elastic.errors import UsageError
from slurm_elastic.ownership import require_own

logger = logging.getLogger("slurm_elastic")

_ASK_INTERVAL = 10.0
"""Seconds between two questions to a worker, at least."""
_ANSWER_LIMIT = 15.0
"""Seconds after a question for which the answer counts; later the worker may be anywhere."""
_ANSWER_POLL = 0.005


class TimeUse(NamedTuple):
    """Seconds that the main thread of a worker has spent on something else than the script's own work.

    Attributes:
        waiting: Asleep, which is waiting for other ranks or the network in a script that computes; None if that is
            unknown, as on GPUs.
        loading: Waiting for input, asleep or not.
        saving: Writing checkpoints.
        restoring: Reading checkpoints.
    """

    waiting: float | None = None
    loading: float = 0.0
    saving: float = 0.0
    restoring: float = 0.0

    def since(self, before: TimeUse) -> TimeUse:
        """Return the time after an earlier moment."""
        unknown = self.waiting is None or before.waiting is None
        waiting, *others = (max(0.0, (now or 0.0) - (then or 0.0)) for now, then in zip(self, before, strict=True))
        return TimeUse(None if unknown else waiting, *others)


@dataclass(frozen=True, slots=True)
class WorkerProgress:
    """The progress of a worker.

    Attributes:
        attached: True if its script uses the trainer API; if not, nothing else is known.
        boundary: Number of steps that it has completed in this round: calls of should_stop.
        step: The step that the script reported last, in its own count; None before.
        checkpoint: The step of the last checkpoint that the script reported; None before.
        seconds_since_boundary: Seconds since the last call of should_stop; None before the first.
        stopped: True if should_stop has told the script to stop.
        seconds_since_first: Seconds since the first call of should_stop in this round; None before it.
        first_step: The step that the script reported by that call, in its own count; None if it reported none.
        loss, loss_step: The loss that the script reported last, and its step; None before.
        before_first: Use of the time before the first call of should_stop in this round, so far; None if it is not
            measured.
        since_first: Use of the time since then; None before, and if it is not measured.
        save_time: Seconds that it saved before it reported that checkpoint; None if unknown.
        answers: True if a thread of it answers `Agreement.ask_workers`.
        in_collective: True if its main thread was in a collective when it was asked; None if that is unknown.
        place: The line of the script at which it was then; empty if that is unknown.
        collectives: The last collective that it had begun in each process group then; empty if that is unknown.
        seconds_awaited: Seconds since its script could have called should_stop for the first time; None if it has, and
            if a loop or a framework does that.
    """

    local_rank: int
    attached: bool
    boundary: int
    step: int | None
    checkpoint: int | None
    seconds_since_boundary: float | None
    stopped: bool
    seconds_since_first: float | None = None
    first_step: int | None = None
    loss: float | None = None
    loss_step: int | None = None
    before_first: TimeUse | None = None
    since_first: TimeUse | None = None
    save_time: float | None = None
    answers: bool = False
    in_collective: bool | None = None
    place: str = ""
    collectives: tuple[page.Collective, ...] = ()
    seconds_awaited: float | None = None


class Agreement:
    """The agents agree on the step at which all workers of a round stop.

    A boundary is a call of should_stop; each worker counts its own, from 1.

    1. Every agent calls `hold`. From then on each worker waits at its next boundary.
    2. The stop step is the maximum of the results. Every agent calls `stop_at` with it. A worker that waits at an
       earlier boundary goes on, and stops at exactly that one.

    No worker can have passed the stop step: docs/architecture.md, "A stop at one step", says why. `hold` waits for no
    worker: one that blocks in a collective, because a peer waits already, counts with the boundary before.

    The result of `hold` stays the same until `release`, whichever agent leads; after `stop_at` it is the stop step.

    Args:
        pages: Of the workers, by local rank; empty if they could not be made.
        barrier: Makes the workers execute a full memory barrier; its argument is True if all of them are registered.
    """

    def __init__(self, pages: Sequence[page.Fields], barrier: Callable[[bool], None] = page.full_barrier) -> None:
        self._pages, self._barrier_of = tuple(pages), barrier
        self._earliest: int | None = None
        self._stop: int | None = None
        self._asked_at: float | None = None

    def hold(self) -> int | None:
        """Make the workers wait at their next boundary. Takes microseconds, at most about 10 ms.

        Returns the earliest boundary, counted from 1, at which all workers can stop. None if a worker does not use the
        trainer API, or has not imported it yet; then no worker waits.
        """
        if self._stop is not None:
            return self._stop
        if self._earliest is None:
            if not self._pages or not all(fields[page.ATTACHED] for fields in self._pages):
                return None
            for fields in self._pages:
                fields[page.HOLD] = 1
            self._barrier()
            self._earliest = 1 + max(fields[page.BOUNDARY] for fields in self._pages)
        return self._earliest

    def release(self) -> None:
        """Cancel the agreement: workers that wait go on. After `stop_at` this does nothing.

        The caller makes sure that no agent has been told a stop step: released workers can pass it.
        """
        if self._stop is None:
            self._earliest = None
            for fields in self._pages:
                fields[page.HOLD] = 0

    def stop_at(self, step: int, reason: str, seconds: float | None = None) -> None:
        """Tell the workers, which wait at a boundary, where to stop. A second call changes the remaining time only.

        Args:
            step: The stop step: the maximum of the results of `hold` on all nodes.
            reason: The reason that the script is told, at most 64 bytes.
            seconds: Seconds from now until the workers are killed; None for no such time.

        Raises:
            ValueError: A worker may have passed that step (`hold` was not called, or the step is not the maximum), or
                the workers were told another one.
        """
        if self._earliest is None or step < self._earliest or self._stop not in (None, step):
            raise ValueError(f"cannot stop at {step}: told {self._stop}, earliest {self._earliest}")
        deadline = page.NONE if seconds is None else time.monotonic_ns() + int(seconds * 1e9)
        for fields in self._pages:
            fields[page.DEADLINE] = deadline
            if self._stop is None:
                page.write_text(fields, reason)
        if self._stop is None:
            # A worker that sees the step must see reason and deadline, on processors that reorder stores, too.
            self._barrier()
            self._stop = step
            for fields in self._pages:
                fields[page.STOP] = step

    def shielded(self) -> bool:
        """Return True if SIGTERM has no effect on any worker."""
        return bool(self._pages) and all(fields[page.SHIELDED] for fields in self._pages)

    def fence(self) -> None:
        """Forbid the workers to publish a checkpoint from now on: another group of workers may be training."""
        for fields in self._pages:
            fields[page.FENCED] = 1

    def progress(self) -> tuple[WorkerProgress, ...]:
        """Return the progress of the workers, by local rank. Any thread may call this."""
        now = time.monotonic_ns()
        asked = self._asked_at is not None and now / 1e9 - self._asked_at < _ANSWER_LIMIT
        return tuple(_progress(rank, fields, now, asked=asked) for rank, fields in enumerate(self._pages))

    def ask_workers(self) -> None:
        """Ask the workers where they are, and for dumps of that beside their logs; any thread may call this.

        A call within 10 s of another one does nothing: a worker that hangs is found by its node, then by the leader.
        """
        now = time.monotonic()
        if self._asked_at is None or now - self._asked_at > _ASK_INTERVAL:
            self._asked_at = now
            for fields in self._pages:
                fields[page.ASKED] += 1

    def await_answers(self, timeout: float) -> None:
        """Wait until all workers that answer have said where they are, and have written their dumps.

        Waits at most `timeout` seconds: a worker may keep Python's lock, or have ended.
        """
        end = time.monotonic() + timeout
        while any(fields[page.DUMPED] < fields[page.ASKED] for fields in self._pages if fields[page.ANSWERER]):
            if time.monotonic() >= end:
                return
            time.sleep(_ANSWER_POLL)

    def _barrier(self) -> None:
        self._barrier_of(all(fields[page.REGISTERED] for fields in self._pages))


class RoundControl(Agreement):
    """The control pages of a round's workers on this node.

    If the pages cannot be made, a warning goes to the log, and the round goes on as if no script used the trainer API.

    Args:
        directory: Scratch directory of this agent, see `agent.node.claims`; made if it does not exist.
    """

    def __init__(self, directory: Path, round: int, local_world_size: int) -> None:
        self._paths: list[Path] = []
        pages: list[page.Fields] = []
        try:
            # logind may have emptied /dev/shm at the last logout of the user (RemoveIPC, logind.conf(5)).
            directory.mkdir(mode=0o700, exist_ok=True)
            # Another user may have made a directory of that name since.
            require_own(directory)
            for local_rank in range(local_world_size):
                descriptor, path = tempfile.mkstemp(prefix=f"{round:04d}.{local_rank}.", dir=directory)
                self._paths.append(Path(path))
                try:
                    pages.append(page.new_page(descriptor))
                finally:
                    os.close(descriptor)
        except (OSError, UsageError) as error:
            logger.warning(
                "workers will be stopped without notice: cannot make a control page in %s: %s", directory, error
            )
            self.close()
            pages = []
        super().__init__(pages)

    def environment(self, local_rank: int) -> dict[str, str]:
        """Return the variables for the environment of a worker."""
        return {VARIABLE: str(self._paths[local_rank])} if self._paths else {}

    def close(self) -> None:
        """Remove the pages' files after the round. `progress` still works; a second call does nothing."""
        for path in self._paths:
            # A worker that uses the trainer API has removed its file.
            with contextlib.suppress(OSError):
                path.unlink()
        self._paths = []


def _progress(local_rank: int, fields: page.Fields, now: int, *, asked: bool) -> WorkerProgress:
    boundary, at, first_at = fields[page.BOUNDARY], fields[page.BOUNDARY_TIME], fields[page.FIRST_TIME]
    loss_step = _known(fields[page.LOSS_STEP])
    has_answer = asked or fields[page.ANSWERED] == page.LAST_ANSWER
    measured = _time_use(fields, page.USES) if fields[page.MEASURED] else None
    first = _time_use(fields, page.FIRST_USES) if measured is not None and first_at else None
    return WorkerProgress(
        local_rank=local_rank,
        attached=bool(fields[page.ATTACHED]),
        boundary=boundary,
        step=_known(fields[page.STEP]),
        checkpoint=_known(fields[page.CHECKPOINT]),
        save_time=fields[page.SAVE_TIME] / 1e9 or None,
        seconds_since_boundary=max(0, now - at) / 1e9 if boundary else None,
        stopped=bool(fields[page.STOPPED]),
        seconds_since_first=max(0, now - first_at) / 1e9 if first_at else None,
        first_step=_known(fields[page.FIRST_STEP]) if first_at else None,
        loss=None if loss_step is None else page.bits_float(fields[page.LOSS]),
        loss_step=loss_step,
        before_first=measured if first is None else first,
        since_first=None if measured is None or first is None else measured.since(first),
        answers=bool(fields[page.ANSWERER]),
        in_collective=_in_collective(fields) if has_answer else None,
        place=page.read_text(fields, page.PLACE) if has_answer else "",
        collectives=_collectives(fields) if has_answer else (),
        seconds_awaited=max(0, now - fields[page.AWAITED]) / 1e9 if fields[page.AWAITED] and not boundary else None,
    )


def _known(value: int) -> int | None:
    return None if value == page.NONE else value


def _collectives(fields: page.Fields) -> tuple[page.Collective, ...]:
    try:
        # The worker may be writing: then this is no JSON.
        collectives = json.loads(page.read_text(fields, page.COLLECTIVES, page.COLLECTIVES_FIELDS) or "[]")
        return tuple((str(group), int(number), str(name)) for group, number, name in collectives)
    except (ValueError, TypeError, OverflowError, RecursionError):
        return ()


def _in_collective(fields: page.Fields) -> bool | None:
    if not fields[page.ANSWERER]:
        return None
    if fields[page.ANSWERED] < fields[page.ASKED]:
        # The main thread keeps Python's lock, which all collectives release.
        return False
    return None if fields[page.IN_COLLECTIVE] == page.NONE else fields[page.IN_COLLECTIVE] == 1


def _time_use(fields: page.Fields, uses: Sequence[int]) -> TimeUse:
    waiting, *others = (fields[use] for use in uses)
    return TimeUse(None if waiting == page.NONE else waiting / 1e9, *(nanoseconds / 1e9 for nanoseconds in others))
