"""Decides when a snapshot in memory is written to disk, and has that done: for the agent of rank 0, in a thread.

The thread only waits, for the time and for the process that writes. It has these written: the snapshot that the round
starts from, if that came from memory; the newest one of the round each time that the interval has passed; and the
newest one before the agent ends.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from slurm_elastic.snapshot.checkpoint_lineage import CheckpointId
from slurm_elastic.snapshot.checkpoint_writer import Order, Outcome, WriterProcess
from slurm_elastic.snapshot.lineage import SnapshotId
from slurm_elastic.snapshot.memory import Slot

__all__ = ["DiskWriter", "Progress", "Target", "next_snapshot"]

logger = logging.getLogger("slurm_elastic")

_AGAIN = 0.5
"""Seconds between looks for a snapshot when the interval has passed and there is none that is new."""
_AFTER_ERROR = 10.0
"""Seconds at least between attempts after one that failed."""
_TURN = 0.1
"""Seconds in which the end of the wait for the last checkpoint follows a signal."""


@dataclass(frozen=True, slots=True)
class Target:
    """The directory in which the snapshots of a round are written.

    Attributes:
        directory: Path of the directory.
        every: Seconds between checkpoints.
        keep: Number of checkpoints that stay.
        start: Number of the round's start in the directory.
        round: Number of the round.
        origin: The snapshot that the round started from, if it came from memory, and its name on disk.
    """

    directory: str
    every: float
    keep: int
    start: int
    round: int
    origin: tuple[SnapshotId, CheckpointId] | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of writing for a target.

    Attributes:
        next_at: Own monotonic time in seconds at which the next checkpoint is due.
        written: The newest step of the round that is on disk, or that cannot be written; None before the first.
        origin_due: True if the origin is not on disk yet.
        last: True if the agent ends after the newest snapshot is on disk.
    """

    next_at: float
    written: int | None = None
    origin_due: bool = False
    last: bool = False


class Next(NamedTuple):
    """The snapshot that is written next, and its name on disk."""

    snapshot: SnapshotId
    checkpoint: CheckpointId


def next_snapshot(target: Target, progress: Progress, held: Sequence[SnapshotId], now: float) -> Next | None:
    """Return the snapshot that has to be written now; None if none.

    Args:
        target: The directory, and the round.
        progress: What has been written.
        held: The committed snapshots in memory.
        now: Own monotonic time in seconds.
    """
    newest = max((each for each in held if each.round == target.round), default=None)
    is_new = newest is not None and (progress.written is None or newest.step > progress.written)
    if newest is not None and is_new and (progress.last or now >= progress.next_at):
        return Next(newest, CheckpointId(target.start, newest.step))
    if progress.origin_due and target.origin is not None and target.origin[0] in held:
        return Next(*target.origin)
    return None


class DiskWriter:
    """Writes the snapshots of an agent, or of a process without an agent, to disk.

    Args:
        slots: The memory, in which the owner may replace slots.
    """

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._slots = slots
        self._process = WriterProcess()
        self._changed = threading.Condition()
        self._target: Target | None = None
        self._progress = Progress(0.0)
        self._closing = False
        self._thread: threading.Thread | None = None

    def aim(self, target: Target | None) -> None:
        """Write the snapshots of another round from now on, or of none."""
        with self._changed:
            now = time.monotonic()
            self._target = target
            if target is not None:
                self._progress = Progress(now + target.every, origin_due=target.origin is not None)
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="slurm-elastic-checkpoints", daemon=True)
                    self._thread.start()
            self._changed.notify()

    def close(self, until: float | None = None, told_to_go: Callable[[], bool] = lambda: False) -> None:
        """Write the newest snapshot, and end.

        Args:
            until: Own monotonic time in seconds after which it is left; None to wait until it is written, or until
                `told_to_go` returns True.
        """
        with self._changed:
            self._closing = True
            self._progress = replace(self._progress, last=True)
            self._changed.notify()
        if self._thread is not None:
            while self._thread.is_alive() and not (told_to_go() if until is None else time.monotonic() >= until):
                self._thread.join(_TURN)
            if self._thread.is_alive():
                logger.warning("the newest snapshot is not on disk: the time is over")
                self._target = None
                self._process.kill()
                self._thread.join(1.0)
        self._process.close()

    def _run(self) -> None:
        try:
            self._process.start()
        except OSError as error:
            logger.error("no snapshot can be written to disk: %s", error)
            return
        while True:
            with self._changed:
                target, found = self._target, self._next()
                if found is None:
                    if self._closing:
                        return
                    self._changed.wait(self._delay())
                    continue
            assert target is not None
            self._write(target, *found)

    def _next(self) -> Next | None:
        if self._target is None:
            return None
        held = [contents.copy.id for slot in tuple(self._slots) if (contents := slot.contents()) is not None]
        return next_snapshot(self._target, self._progress, held, time.monotonic())

    def _delay(self) -> float | None:
        if self._target is None:
            return None
        return max(_AGAIN, self._progress.next_at - time.monotonic())

    def _write(self, target: Target, snapshot: SnapshotId, checkpoint: CheckpointId) -> None:
        outcome = Outcome()
        for slot in tuple(self._slots):
            contents = slot.contents()
            if contents is not None and contents.copy.id == snapshot:
                slot.busy = True
                try:
                    order = Order(target.directory, checkpoint.start, checkpoint.step, target.keep, self._closing)
                    outcome = self._process.write(order, slot)
                finally:
                    slot.busy = False
        with self._changed:
            if self._target is not target:
                return
            if outcome.superseded:
                logger.warning("no snapshot is written to disk any more: %s", outcome.superseded)
                self._target = None
            elif outcome.error:
                wait = max(_AFTER_ERROR, target.every)
                logger.error(
                    "the snapshot of step %d cannot be written to %s: %s%s",
                    *(checkpoint.step, target.directory, outcome.error),
                    "" if self._closing else f"; the next attempt is in {wait:g} s",
                )
                self._done(snapshot, time.monotonic() + wait, target)
            elif outcome.written:
                logger.info("step %d is on disk: %s", checkpoint.step, target.directory)
                self._done(snapshot, time.monotonic() + target.every, target)

    def _done(self, snapshot: SnapshotId, next_at: float, target: Target) -> None:
        if target.origin is not None and snapshot == target.origin[0]:
            self._progress = replace(self._progress, origin_due=False)
        else:
            self._progress = Progress(next_at, snapshot.step, last=self._progress.last)
