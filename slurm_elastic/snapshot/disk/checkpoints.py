"""A directory of checkpoints on disk, which all nodes see.

::

    start-000008.json                       one per group of workers that started: see lineage.py
    start-000008.step-000000000120/         a checkpoint in the format of torch.distributed.checkpoint, with
        snapshot.json                       its description as in memory, and the place of each tensor in the files
        part-000003.distcp                  the shards and the own state of one rank
        part-000003.json                    their places in that file
    .start-000008.step-000000000120.000009/ a checkpoint that the agents of start 9 write

The agents of a group write the parts that they hold, each part one agent, by an exclusive creation. A checkpoint is
complete when it has its name. torch.distributed.checkpoint reads it without slurm_elastic; `read` here unpickles
nothing but tensors and the state of a rank's own, by torch's loader for weights.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from slurm_elastic.rundir import claim_file, list_names, read_file, sync_directory
from slurm_elastic.snapshot.disk.lineage import (
    CheckpointId,
    Start,
    checkpoint_between,
    choose_checkpoint,
    deletable,
    line_from_checkpoint,
    line_from_memory,
    read_start,
)
from slurm_elastic.snapshot.disk.stored import CheckpointError, DamagedCheckpointError, Stored, file_name
from slurm_elastic.snapshot.lineage import SnapshotId

logger = logging.getLogger("slurm_elastic")

_START = re.compile(r"start-(\d{6,})\.json")
_CHECKPOINT = re.compile(r"start-(\d{6,})\.step-(\d{12,})")
_UNFINISHED = re.compile(r"\.start-(\d{6,})\.step-(\d{12,})\.\w+")
_DAMAGED = ".damaged"
"""The end of the name of a checkpoint that is set aside."""
_PAUSE = 0.1


class SupersededError(CheckpointError):
    """Another group of workers has started in the directory, from a state without this checkpoint."""


class Checkpoints:
    """The checkpoints in a directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stored: dict[CheckpointId, Stored] = {}

    # Starts.

    def start(
        self,
        run: str,
        round_: int,
        memory: SnapshotId | None,
        below: int | None,
        is_current: Callable[[], bool] = lambda: True,
        lost: SnapshotId | None = None,
    ) -> tuple[Start, CheckpointId | None]:
        """Record that a group of workers starts; makes the directory if it is missing.

        Args:
            memory: The snapshot in memory that the group starts from; None to start from the newest checkpoint.
            below: See :func:`~.choose_checkpoint`.
            is_current: Returns False once a newer group of the run may train.
            lost: A newer snapshot than that in memory: the group starts from a checkpoint between them if there is one.

        Returns:
            The start, and the checkpoint that the group starts from; None for the state in memory, or for nothing.

        Raises:
            SupersededError: A newer group of the run may train.
            CheckpointError: A record in the directory cannot be read.
            OSError: The directory cannot be read or written.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        while True:
            newest = self.newest_start()
            if memory is None:
                chosen = choose_checkpoint(newest, self.present(), below)
                line = line_from_checkpoint(newest, chosen)
            else:
                earlier = [] if newest is None else [self._read_start(last.start) for last in reversed(newest.line)]
                starts = [start for start in (newest, *earlier) if start is not None]
                chosen, line = None, line_from_memory(starts, run, memory.round, memory.step)
                if lost is not None:
                    chosen = checkpoint_between(starts, run, memory, lost, self.present())
                if chosen is not None:
                    line = line_from_checkpoint(newest, chosen)
            if chosen is not None:
                try:
                    self.read(chosen)
                except DamagedCheckpointError as error:
                    self.mark_damaged(chosen, str(error))
                    continue
            elif memory is None and newest is not None and (lost_ones := self.damaged(newest)):
                raise CheckpointError(
                    f"all checkpoints of {self.path} that this run can start from are damaged: "
                    f"{', '.join(lost_ones)}; restore one under its name without {_DAMAGED}, or remove them to start "
                    "from the beginning"
                )
            start = Start(1 if newest is None else newest.number + 1, line, run, round_)
            if not is_current():
                raise SupersededError("a newer round has started")
            path = self._start_path(start.number)
            if not claim_file(path, msgspec.json.encode(start)):
                # Another group was faster. A node may see its record a moment later than its name.
                time.sleep(_PAUSE)
                continue
            if not is_current():
                path.unlink()
                raise SupersededError("a newer round has started")
            return start, chosen

    def newest_start(self) -> Start | None:
        """Return the newest start; None if there is none. Raises CheckpointError or OSError if it cannot be read."""
        while numbers := [int(match[1]) for name in list_names(self.path) if (match := _START.fullmatch(name))]:
            start = self._read_start(max(numbers))
            if start is not None:
                return start
        return None

    def _read_start(self, number: int) -> Start | None:
        path = self._start_path(number)
        content = read_file(path)
        if content is None:
            return None
        try:
            return read_start(content, number)
        except ValueError as error:
            raise CheckpointError(f"{path} is no record of a start: {error}; restore or remove it") from None

    def _start_path(self, number: int) -> Path:
        return self.path / f"start-{number:06d}.json"

    # Checkpoints.

    def present(self) -> list[CheckpointId]:
        """Return the complete checkpoints in the directory, on the line or not."""
        return [found for name in list_names(self.path) if (found := _named(name, _CHECKPOINT)) is not None]

    def mark_damaged(self, checkpoint: CheckpointId, why: str) -> None:
        """Take a damaged checkpoint out of the way of groups to come; raises CheckpointError if it stays there."""
        path = self.path_of(checkpoint)
        if not path.exists():
            # Another process was faster, or a newer group has deleted it.
            return
        logger.error("%s; it is set aside as %s%s, and the one before it counts", why, path.name, _DAMAGED)
        try:
            path.rename(path.with_name(path.name + _DAMAGED))
        except OSError as error:
            if path.exists():
                raise CheckpointError(f"{why}; it cannot be set aside: {error.strerror}") from None

    def damaged(self, newest: Start | None = None) -> list[str]:
        """Return the names of those that were set aside; only those on the line of a start, if one is given."""
        names = [name for name in list_names(self.path) if name.endswith(_DAMAGED)]
        checkpoints = {name: _named(name.removesuffix(_DAMAGED), _CHECKPOINT) for name in names}
        return sorted(name for name, of in checkpoints.items() if of and (newest is None or newest.has(of)))

    def path_of(self, checkpoint: CheckpointId) -> Path:
        """Return the directory of a checkpoint."""
        return self.path / file_name(checkpoint)

    def unfinished(self, checkpoint: CheckpointId, writer: int) -> Path:
        """Return the directory in which the agents of a start write a checkpoint; it is made if it is missing.

        Raises:
            SupersededError: The newest start in the directory does not have this checkpoint on its line.
            CheckpointError, OSError: It cannot be made.
        """
        self.require_line(checkpoint)
        path = self._unfinished(checkpoint, writer)
        path.mkdir(exist_ok=True)
        return path

    def publish(
        self, checkpoint: CheckpointId, writer: int, finish: Callable[[Path], bool], keep: int, *, is_last: bool = False
    ) -> bool:
        """Give a checkpoint its name if it is complete, and delete those that are not needed any more.

        Args:
            writer: Number of the start of the group that writes, in the directory.
            finish: Finishes what was written in a directory; returns False if it is not complete.
            is_last: True if the group takes no step any more: later ones that some of its agents have written go, too.

        Returns False if the checkpoint is not complete; raises as `unfinished`.
        """
        newest = self.require_line(checkpoint)
        final, part = self.path_of(checkpoint), self._unfinished(checkpoint, writer)
        if not final.exists():
            if not finish(part):
                return False
            newest = self.require_line(checkpoint)
            try:
                part.rename(final)
            except OSError:
                # A directory that has files is not replaced, rename(2): another group has written the same checkpoint.
                if not final.exists():
                    raise
            sync_directory(self.path)
        shutil.rmtree(part, ignore_errors=True)
        for old in deletable(newest, self.present(), keep):
            self._delete(old)
        self._delete_unfinished(newest, checkpoint, is_last=is_last)
        return True

    def unfinished_size(self, checkpoint: CheckpointId, writer: int) -> int | None:
        """Return the bytes that agents have written of a checkpoint; None if they have completed it or given it up."""
        part = self._unfinished(checkpoint, writer)
        if part.name not in list_names(self.path):
            return None
        size = 0
        for name in list_names(part):
            with contextlib.suppress(FileNotFoundError):
                size += (part / name).stat().st_size
        return size

    def discard(self, checkpoint: CheckpointId, writer: int) -> None:
        """Delete what was written of a checkpoint that is not completed."""
        shutil.rmtree(self._unfinished(checkpoint, writer), ignore_errors=True)

    def _unfinished(self, checkpoint: CheckpointId, writer: int) -> Path:
        return self.path / f".{file_name(checkpoint)}.{writer:06d}"

    def read(self, checkpoint: CheckpointId) -> Stored:
        """Return the state of a checkpoint; shards, and what ranks had of their own, are read when they are asked for.

        Raises as `Stored`.
        """
        if checkpoint not in self._stored:
            # One only: it has the tensors of the state.
            self._stored = {checkpoint: Stored(self.path_of(checkpoint))}
            if not self._stored[checkpoint].has_digests and os.environ.get("RANK", "0") == "0":
                path = self.path_of(checkpoint)
                logger.warning("%s is of an earlier release and has no digests: it is loaded unchecked", path)
        return self._stored[checkpoint]

    def require_line(self, checkpoint: CheckpointId) -> Start:
        """Return the newest start, which has this checkpoint on its line; raises SupersededError if it does not."""
        newest = self.newest_start()
        if newest is None:
            raise SupersededError(f"{self.path} has no record of start {checkpoint.start} any more")
        if not newest.has(checkpoint):
            raise SupersededError(
                f"start {newest.number} has taken over {self.path}, from a state without step {checkpoint.step}"
            )
        return newest

    def _delete(self, checkpoint: CheckpointId) -> None:
        # Without its name first: a checkpoint that is half deleted is none.
        path = self.path_of(checkpoint)
        part = path.with_name(f".{path.name}.deleted")
        with contextlib.suppress(OSError):
            path.rename(part)
        shutil.rmtree(part, ignore_errors=True)

    def _delete_unfinished(self, newest: Start, written: CheckpointId, *, is_last: bool) -> None:
        """Delete what has not been completed. The group before the newest may be writing still."""
        before = newest.line[-1].start if newest.line else newest.number
        for name in list_names(self.path):
            unfinished = _named(name, _UNFINISHED)
            if unfinished is None:
                continue
            if unfinished.start < before or (unfinished.start == written.start and (is_last or unfinished < written)):
                shutil.rmtree(self.path / name, ignore_errors=True)
        for name in list_names(self.path):
            match = _START.fullmatch(name)
            on_line = {last.start for last in newest.line}
            if match and int(match[1]) < newest.number and int(match[1]) not in on_line:
                (self.path / name).unlink(missing_ok=True)


def _named(name: str, pattern: re.Pattern[str]) -> CheckpointId | None:
    match = pattern.fullmatch(name)
    return None if match is None else CheckpointId(int(match[1]), int(match[2]))
