"""Decides when a snapshot in memory is written to disk, and has that done: for an agent, in a thread.

It has these written: the snapshot that the round starts from, if that came from memory; the newest one of the round
each time that the interval has passed; and the newest one before the agent ends. The agent of rank 0 writes the state
of all ranks, and gives the checkpoint its name when all parts are there; each agent writes the parts that it holds.
Several agents with parts write a step that all of them keep (:mod:`~slurm_elastic.snapshot.replication`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from slurm_elastic.snapshot.disk.lineage import CheckpointId
from slurm_elastic.snapshot.disk.writer import Fork, Order, Outcome, Task, WriterProcess
from slurm_elastic.snapshot.hand_over import Directory
from slurm_elastic.snapshot.lineage import ALONE, Copy, Group, SnapshotId
from slurm_elastic.snapshot.memory import Slot

logger = logging.getLogger("slurm_elastic")

_AGAIN = 0.5
"""Seconds between looks for a snapshot when the interval has passed and there is none that is new."""
_AFTER_ERROR = 10.0
"""Seconds at least between attempts after one that failed."""
_TURN = 0.1
"""Seconds in which the end of the wait for the last checkpoint follows a signal, and between looks for parts."""
_SILENCE = 30.0
"""Seconds in which no other agent has written anything after which a checkpoint is given up: longer than their
processes take to import torch."""
_STALLED = 5.0
"""The same before the end of an agent, after which it writes the step before, too."""


class HeldSlots(NamedTuple):
    """The memory of an agent: for the state of all ranks, the parts of its ranks, and copies of others' parts."""

    whole: Sequence[Slot]
    parts: Sequence[Slot] = ()
    replicas: Sequence[Slot] = ()


class Held(NamedTuple):
    """The committed snapshots and parts in `HeldSlots`."""

    whole: Sequence[Copy]
    parts: Sequence[Copy] = ()
    replicas: Sequence[Copy] = ()


@dataclass(frozen=True, slots=True)
class Target:
    """The directory in which the agents of a round, or a process without an agent, write snapshots.

    `origin` is the snapshot that the round started from, if it came from memory.
    """

    directory: Directory
    round: int
    group: Group = ALONE
    origin: SnapshotId | None = None

    @property
    def first(self) -> bool:
        """True for the agent of rank 0, which writes the state of all ranks and completes checkpoints."""
        return self.group.rank == 0

    def checkpoint(self, snapshot: SnapshotId) -> CheckpointId:
        """Return the name on disk of a snapshot of the round, or of the origin."""
        start = self.directory.start if snapshot.round == self.round else self.directory.origin
        return CheckpointId(start, snapshot.step)


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of writing for a target.

    Attributes:
        next_at: Own monotonic time in seconds at which the next checkpoint is due.
        written: The newest step of the round that is on disk, or that cannot be written; None before the first.
        origin_due: True if the origin is not on disk yet.
        last: True if the newest snapshot is to be on disk now: the agent ends, or others do.
        agreed: The step that all agents keep, to write it; None if none is known.
        failed: True if the last attempt was one; then the next one is at that time.
    """

    next_at: float
    written: int | None = None
    origin_due: bool = False
    last: bool = False
    agreed: int | None = None
    failed: bool = False


def next_snapshot(target: Target, progress: Progress, copies: Held, now: float) -> SnapshotId | None:
    """Return the snapshot that has to be written now, by monotonic time, or whose parts have to be; None if none."""
    newest = _newest(target, progress, copies)
    agreed = next((copy for copy in _whole(target, copies) if copy.id.step == progress.agreed), None)
    if newest is not None and (
        progress.last or (_decides_alone(target, newest) and _is_due(target, progress, newest, now))
    ):
        return newest.id
    if agreed is not None and (progress.written is None or agreed.id.step > progress.written):
        return agreed.id
    if progress.origin_due and target.origin is not None:
        parts = [copy for copy in (*copies.parts, *copies.replicas) if copy.id == target.origin]
        if any(copy.id == target.origin and (target.first or parts) for copy in copies.whole):
            return target.origin
    return None


def step_before(target: Target, step: int, copies: Held) -> SnapshotId | None:
    """Return the newest snapshot of the round before a step of which this agent has all that its ranks have.

    It may be the newest one of another agent: where workers were stopped at no agreed step, one has taken a step more.
    """
    return max((copy.id for copy in _whole(target, copies) if copy.id.step < step), default=None)


def is_wanted(target: Target, progress: Progress, copies: Held, now: float) -> bool:
    """Return True if a step that all agents keep has to be asked for; arguments as for `next_snapshot`."""
    newest = _newest(target, progress, copies)
    if newest is None or not target.first or progress.agreed is not None or _decides_alone(target, newest):
        return False
    return _is_due(target, progress, newest, now)


def _is_due(target: Target, progress: Progress, newest: Copy, now: float) -> bool:
    steps = newest.id.step - (target.directory.begins if progress.written is None else progress.written)
    return now >= progress.next_at or (0 < target.directory.every_steps <= steps and not progress.failed)


def _decides_alone(target: Target, copy: Copy) -> bool:
    return target.first and (not copy.parts or target.group.nodes == 1)


def _whole(target: Target, copies: Held) -> list[Copy]:
    """Return the snapshots of the round of which this agent has all that its ranks have."""

    def has_parts(copy: Copy) -> bool:
        return sum(part.id == copy.id for part in copies.parts) == target.group.workers if copy.parts else target.first

    return [copy for copy in copies.whole if copy.id.round == target.round and has_parts(copy)]


def _newest(target: Target, progress: Progress, copies: Held) -> Copy | None:
    newest = max(_whole(target, copies), key=lambda copy: copy.id, default=None)
    is_new = newest is not None and (progress.written is None or newest.id.step > progress.written)
    return newest if is_new else None


@dataclass(frozen=True, slots=True)
class _Unfinished:
    """A checkpoint to which other agents add something.

    Attributes:
        alive_at: Own monotonic time in seconds at which its size, in bytes, has grown last.
        is_only: False if the agent has written the step before, too, or this is that step.
    """

    target: Target
    snapshot: SnapshotId
    alive_at: float
    size: int = -1
    is_only: bool = True


class DiskWriter:
    """Writes the snapshots of an agent, or of a process without an agent, to disk.

    `slots` returns the memory; for `fork` see `WriterProcess`.
    """

    def __init__(self, slots: Callable[[], HeldSlots], fork: Fork | None = None) -> None:
        self._slots = slots
        self._process = WriterProcess(fork)
        self._changed = threading.Condition()
        self._target: Target | None = None
        self._progress = Progress(0.0)
        self._unfinished: tuple[_Unfinished, ...] = ()
        self._writing = self._closing = self._repeats = False
        self._missing = ""
        self._thread: threading.Thread | None = None

    def aim(self, target: Target | None) -> None:
        """Write the snapshots of another round from now on, or of none."""
        with self._changed:
            now = time.monotonic()
            self._target = target
            if not self._writing:
                self._free()
            self._unfinished = tuple(one for one in self._unfinished if one.target.first)
            if target is not None:
                self._progress = Progress(now + target.directory.every, origin_due=target.origin is not None)
                if (following := self._next()) is not None:
                    # Workers have not come to their first snapshot.
                    _mark(self._slots(), following)
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="slurm-elastic-checkpoints", daemon=True)
                    self._thread.start()
            self._changed.notify_all()

    def wants_step(self) -> bool:
        """Return True if a step that all agents keep has to be found, for :meth:`agree`."""
        with self._changed:
            target, now = self._target, time.monotonic()
            if target is None or (now < self._progress.next_at and not target.directory.every_steps):
                return False
            return is_wanted(target, self._progress, self._held(), now) and not self._is_busy()

    def agree(self, snapshot: SnapshotId) -> None:
        """Write this snapshot, which all agents keep; from now on workers do not overwrite it."""
        with self._changed:
            if self._target is not None and snapshot.round == self._target.round:
                self._progress = replace(self._progress, agreed=snapshot.step)
                _mark(self._slots()._replace(replicas=()), snapshot)
            self._changed.notify_all()

    def flush(self, until: float, is_leaving: Callable[[], bool]) -> None:
        """Wait until the newest snapshot is on disk, or until a monotonic time, or `is_leaving()`. No workers run."""
        with self._changed:
            self._progress = replace(self._progress, last=True)
            self._changed.notify_all()
            while self._is_busy() and time.monotonic() < until and not is_leaving():
                self._changed.wait(_TURN)

    def close(self, until: float | None = None, is_leaving: Callable[[], bool] = lambda: False) -> str:
        """Write the newest snapshot, and end; returns why it is not on disk, empty if there is no reason.

        It is left at the monotonic time `until`; None to wait until it is written, or until `is_leaving` returns True.
        """
        with self._changed:
            self._closing = True
            self._progress = replace(self._progress, last=True)
            self._changed.notify_all()
        if self._thread is not None:
            while self._thread.is_alive() and not (is_leaving() if until is None else time.monotonic() >= until):
                self._thread.join(_TURN)
            if self._thread.is_alive():
                self._missing = "the time is over"
                logger.warning("the newest snapshot is not on disk: %s", self._missing)
                with self._changed:
                    self._target, self._unfinished = None, ()
                self._process.kill()
                self._thread.join()
        self._process.close()
        return self._missing

    def _is_busy(self) -> bool:
        return self._writing or bool(self._unfinished) or self._next() is not None

    def _run(self) -> None:
        try:
            self._process.start()
        except OSError as error:
            self._missing = str(error)
            logger.error("no snapshot can be written to disk: %s", error)
            return
        while True:
            with self._changed:
                self._writing = False
                self._changed.notify_all()
                target, unfinished = self._target, self._unfinished
                # A checkpoint is completed before the next one of its round begins, or none ever would be where steps
                # are faster than the disk. When the agent is about to end, the newest step counts.
                waits = not self._progress.last and any(one.target is target for one in unfinished)
                following = None if waits else self._next()
                if following is None and not unfinished:
                    if self._closing:
                        return
                    self._changed.wait(self._delay())
                    continue
                self._writing = following is not None
            if following is not None:
                assert target is not None
                self._write(target, following)
            elif not any(self._complete(one) for one in unfinished):
                with self._changed:
                    self._changed.wait(_TURN)

    def _held(self) -> Held:
        return Held(
            *([contents.copy for slot in slots if (contents := slot.contents()) is not None] for slots in self._slots())
        )

    def _next(self) -> SnapshotId | None:
        if self._target is None:
            return None
        return next_snapshot(self._target, self._progress, self._held(), time.monotonic())

    def _delay(self) -> float | None:
        if self._target is None:
            return None
        return _AGAIN if self._target.directory.every_steps else max(_AGAIN, self._progress.next_at - time.monotonic())

    def _write(self, target: Target, snapshot: SnapshotId, beside: tuple[_Unfinished, ...] = ()) -> None:
        slots = self._slots()
        _mark(slots, snapshot)
        outcome = Outcome()
        try:
            whole = next((slot for slot in slots.whole if slot.snapshot == snapshot), None)
            # Each part is written once, by one of those that have it. Copies first: there are only two slots for them,
            # so no step becomes safe while one of these is busy for long.
            with_part = (*(slots.replicas if snapshot == target.origin else ()), *slots.parts)
            parts = [slot for slot in with_part if slot.snapshot == snapshot]
            if whole is not None:
                orders: list[tuple[Task, list[Slot]]] = [("part", [whole, part]) for part in parts]
                if target.first:
                    orders.insert(0, ("state", [whole]))
                for task, arguments in orders:
                    outcome = self._carry_out(target, snapshot, task, *arguments)
                    arguments[-1].busy = task == "state"
                    if not outcome.written:
                        break
        finally:
            self._free(target.round, snapshot)
        if not self._note(target, snapshot, outcome) and target.first:
            self._carry_out(target, snapshot, "discard")
        elif target.first or (outcome.written and self._progress.last and not (self._closing and beside)):
            # The agent of rank 0 may leave, and complete it after this one has joined the next round.
            self._unfinished = (*beside, _Unfinished(target, snapshot, time.monotonic(), is_only=not beside))

    def _complete(self, unfinished: _Unfinished) -> bool:
        """Give a checkpoint its name if all parts are there; False if there is nothing to do but wait for them."""
        target, snapshot, now = unfinished.target, unfinished.snapshot, time.monotonic()
        others = tuple(one for one in self._unfinished if one.snapshot != snapshot)
        task: Task = "complete" if target.first else "look"
        outcome = self._carry_out(target, snapshot, task)
        waits = not (outcome.written or outcome.error or outcome.superseded)
        if waits and outcome.size != unfinished.size:
            self._unfinished = (*others, replace(unfinished, size=outcome.size, alive_at=now))
            return False
        if waits and unfinished.is_only and self._progress.last and now >= unfinished.alive_at + _STALLED:
            beside = (replace(unfinished, is_only=False),)
            # Another agent than that of rank 0 ends when it has written both.
            self._unfinished = beside if target.first or not self._closing else ()
            if (earlier := step_before(target, snapshot.step, self._held())) is not None:
                self._write(target, earlier, beside)
            return True
        if waits and now < unfinished.alive_at + _SILENCE:
            return False
        self._unfinished = () if outcome.written else others
        if not target.first:
            return True
        if waits:
            outcome = Outcome(error="another node has not written its part")
        if outcome.written:
            logger.info("step %d is on disk: %s", snapshot.step, target.directory.path)
        elif not self._note(target, snapshot, outcome):
            self._carry_out(target, snapshot, "discard")
        return True

    def _carry_out(self, target: Target, snapshot: SnapshotId, task: Task, *slots: Slot) -> Outcome:
        order = Order(target.directory, target.checkpoint(snapshot), task, self._progress.last)
        return self._process.carry_out(order, *slots)

    def _note(self, target: Target, snapshot: SnapshotId, outcome: Outcome) -> bool:
        """Note how it went; False if what was written of the checkpoint is of no use."""
        with self._changed:
            is_target = self._target is target
            if outcome.superseded and is_target:
                self._missing = outcome.superseded
                logger.warning("no snapshot is written to disk any more: %s", outcome.superseded)
                self._target = None
            elif outcome.error and is_target:
                wait = _AFTER_ERROR if target.directory.every_steps else max(_AFTER_ERROR, target.directory.every)
                # There is no later one. A process that writes and was killed is started again.
                self._missing, self._repeats = outcome.error, self._closing and not self._repeats
                then = "" if self._closing else f"; the next attempt is in {wait:g} s"
                logger.error(
                    "the snapshot of step %d cannot be written to %s: %s%s",
                    *(snapshot.step, target.directory.path, outcome.error),
                    "; it is tried once more" if self._repeats else then,
                )
                if not self._repeats:
                    self._done(snapshot, time.monotonic() + wait, target, failed=True)
            elif outcome.written and is_target:
                self._missing = ""
                self._done(snapshot, time.monotonic() + target.directory.every, target)
            return outcome.written

    def _done(self, snapshot: SnapshotId, next_at: float, target: Target, *, failed: bool = False) -> None:
        if snapshot == target.origin:
            self._progress = replace(self._progress, origin_due=False)
        else:
            progress = self._progress
            # The agents may have agreed on the next one meanwhile.
            agreed = progress.agreed if progress.agreed is not None and progress.agreed > snapshot.step else None
            # The step before the newest is written after it.
            written = max(snapshot.step, progress.written or 0)
            self._progress = Progress(next_at, written, last=progress.last, agreed=agreed, failed=failed)

    def _free(self, round_: int | None = None, written: SnapshotId | None = None) -> None:
        """Let workers overwrite slots again: all, but those with newer snapshots of the round than what was written.

        The agents may have agreed on one of these meanwhile: others see that all parts are on disk before this one is
        here.
        """
        for slots in self._slots():
            for slot in slots:
                held = slot.snapshot
                if slot.busy and (written is None or held is None or held.round != round_ or held <= written):
                    slot.busy = False


def _mark(groups: HeldSlots, snapshot: SnapshotId) -> None:
    """Keep workers from overwriting a snapshot while it is written."""
    for slots in groups:
        for slot in slots:
            if slot.snapshot == snapshot:
                slot.busy = True
