"""Decides which checkpoint on disk a group of workers starts from, which ones it may publish, which ones go. Pure.

Each group of workers that starts in a directory, of whatever round or run, is given the next number there, its start,
by the exclusive creation of a record. The record has the line of the start: the last checkpoint of each earlier start
that the state of the group went through. A checkpoint counts if the newest start took it, or has it on its line. So
what a group that was cut off publishes later replaces nothing, whatever its step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from slurm_elastic import typed_json
from slurm_elastic.snapshot.lineage import SnapshotId

_LINE = 16
"""Starts that a line reaches back."""


@dataclass(frozen=True, slots=True, order=True)
class CheckpointId:
    """The number of the start whose workers took a checkpoint, and the script's own count of steps."""

    start: int
    step: int


@dataclass(frozen=True, slots=True)
class Start:
    """The start of a group of workers in a directory of checkpoints.

    Attributes:
        number: From 1.
        line: The last checkpoint on the line of each start before, oldest first; the last entry is the state that the
            group started from, which may have been in memory only.
        run: Id of the run; empty outside of one.
    """

    number: int
    line: tuple[CheckpointId, ...] = ()
    run: str = ""
    round: int = 0

    def has(self, checkpoint: CheckpointId) -> bool:
        """Return True if the state of this group comes from the checkpoint, or the group itself took it."""
        return checkpoint.start == self.number or any(
            checkpoint.start == last.start and checkpoint.step <= last.step for last in self.line
        )


def choose_checkpoint(
    newest: Start | None, present: Iterable[CheckpointId], below: int | None = None
) -> CheckpointId | None:
    """Return the checkpoint that the next group starts from, by the newest start; None if there is none.

    `below` is the step of a state from which workers failed: an earlier one is chosen if there is any.
    """
    usable = [checkpoint for checkpoint in present if newest is not None and newest.has(checkpoint)]
    earlier = (checkpoint for checkpoint in usable if below is None or checkpoint.step < below)
    # The start is the worst choice: a failure need not come from the state.
    return max(earlier, default=max(usable, default=None))


def checkpoint_between(
    starts: Sequence[Start], run: str, start_snapshot: SnapshotId, lost: SnapshotId, present: Iterable[CheckpointId]
) -> CheckpointId | None:
    """Return the newest checkpoint that is newer than one snapshot and not newer than another; None if there is none.

    Args:
        starts: The newest start in the directory, and those on its line, newest first.
        present: The checkpoints in the directory. Those that the newest start does not come from do not count.
    """
    rounds = {start.number: start.round for start in starts if start.run == run}
    usable = (
        checkpoint
        for checkpoint in present
        if checkpoint.start in rounds
        and starts[0].has(checkpoint)
        and start_snapshot < SnapshotId(rounds[checkpoint.start], checkpoint.step) <= lost
    )
    return max(usable, default=None)


def line_from_checkpoint(newest: Start | None, chosen: CheckpointId | None) -> tuple[CheckpointId, ...]:
    """Return the line of a group that starts from a checkpoint on the line of the newest start, or from nothing."""
    if newest is None or chosen is None:
        return ()
    kept = tuple(last for last in newest.line if last.start < chosen.start)
    return (*kept, chosen)[-_LINE:]


def line_from_memory(starts: Iterable[Start], run: str, round_: int, step: int) -> tuple[CheckpointId, ...]:
    """Return the line of a group that starts from a snapshot in memory, which a round of a run took at a step.

    It is empty if that round has no start among these: the newest in the directory, and those on its line, newest
    first.
    """
    for start in starts:
        if (start.run, start.round) == (run, round_):
            return (*start.line, CheckpointId(start.number, step))[-_LINE:]
    return ()


def deletable(newest: Start, present: Collection[CheckpointId], keep: int) -> list[CheckpointId]:
    """Return the checkpoints that are not needed any more: all but the `keep` newest ones on the line of a start.

    What is older than the beginning of the line belongs to other trainings and stays.
    """
    root = newest.line[0] if newest.line else CheckpointId(newest.number, 0)
    on_line = sorted((checkpoint for checkpoint in present if newest.has(checkpoint)), reverse=True)
    left_behind = (checkpoint for checkpoint in present if checkpoint > root and not newest.has(checkpoint))
    return [*on_line[keep:], *left_behind]


def read_start(content: bytes, number: int) -> Start:
    """Return the start of a number from its record; raises ValueError if that is no such record."""
    start = typed_json.decode(content, Start)
    if start.number != number:
        raise ValueError(f"it is the record of start {start.number}")
    return start
