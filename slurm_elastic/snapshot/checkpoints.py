"""A directory of checkpoints on disk, which all nodes see.

::

    start-000008.json                       one per group of workers that started: see checkpoint_lineage.py
    start-000008.step-000000000120/         a checkpoint in the format of torch.distributed.checkpoint, with
        snapshot.json                       its description as in memory, and the place of each tensor in the files
    .start-000008.step-000000000120.<id>/   a checkpoint that is being written

A checkpoint is complete when it has its name. torch.distributed.checkpoint reads it without slurm_elastic; `read` here
unpickles nothing but tensors, by torch's loader for weights.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from slurm_elastic.rundir import claim_file, list_names, publish_file, read_file
from slurm_elastic.snapshot.checkpoint_lineage import (
    CheckpointId,
    Start,
    choose_checkpoint,
    deletable,
    line_from_checkpoint,
    line_from_memory,
    read_start,
    write_start,
)
from slurm_elastic.snapshot.lineage import SnapshotId
from slurm_elastic.snapshot.state import rebuild

__all__ = ["CheckpointError", "Checkpoints", "SupersededError", "describe_files"]

_START = re.compile(r"start-(\d{6,})\.json")
_CHECKPOINT = re.compile(r"start-(\d{6,})\.step-(\d{12,})")
_UNFINISHED = re.compile(r"\.start-(\d{6,})\.step-(\d{12,})\.\w+")
_DESCRIPTION = "snapshot.json"
_VERSION = 1
_PAUSE = 0.1


class CheckpointError(Exception):
    """A checkpoint cannot be read or written."""


class SupersededError(CheckpointError):
    """Another group of workers has started in the directory, from a state without this checkpoint."""


class Checkpoints:
    """The checkpoints in a directory.

    Args:
        path: Of the directory.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    # Starts.

    def start(
        self,
        run: str,
        round_: int,
        memory: SnapshotId | None,
        below: int | None,
        is_current: Callable[[], bool] = lambda: True,
    ) -> tuple[Start, CheckpointId | None]:
        """Record that a group of workers starts; makes the directory if it is missing.

        Args:
            run: Id of the run; empty outside of a run.
            round_: Number of the round.
            memory: The snapshot in memory that the group starts from; None to start from the newest checkpoint.
            below: See :func:`~.choose_checkpoint`.
            is_current: Returns False once a newer group of the run may train.

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
                chosen, line = None, line_from_memory(self._on_line(newest), run, memory.round, memory.step)
            start = Start(1 if newest is None else newest.number + 1, line, run, round_)
            if not is_current():
                raise SupersededError("a newer round has started")
            path = self._start_path(start.number)
            if not claim_file(path, write_start(start)):
                # Another group was faster. A node may see its record a moment later than its name.
                time.sleep(_PAUSE)
                continue
            if not is_current():
                path.unlink()
                raise SupersededError("a newer round has started")
            return start, chosen

    def newest_start(self) -> Start | None:
        """Return the newest start; None if there is none.

        Raises:
            CheckpointError: Its record cannot be read.
            OSError: The directory cannot be read.
        """
        while numbers := [int(found[1]) for name in list_names(self.path) if (found := _START.fullmatch(name))]:
            start = self._read_start(max(numbers))
            if start is not None:
                return start
        return None

    def _on_line(self, newest: Start | None) -> Iterator[Start]:
        if newest is None:
            return
        yield newest
        for last in reversed(newest.line):
            start = self._read_start(last.start)
            if start is not None:
                yield start

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
        found = (_CHECKPOINT.fullmatch(name) for name in list_names(self.path))
        return [CheckpointId(int(each[1]), int(each[2])) for each in found if each]

    def path_of(self, checkpoint: CheckpointId) -> Path:
        """Return the directory of a checkpoint."""
        return self.path / _name(checkpoint)

    def publish(
        self, checkpoint: CheckpointId, write: Callable[[Path], bytes], is_unchanged: Callable[[], bool], keep: int
    ) -> bool:
        """Write a checkpoint, give it its name, and delete those that are not needed any more.

        Args:
            checkpoint: To write.
            write: Writes the files into a directory, and returns the description.
            is_unchanged: Asked when all is written: False if the state has changed meanwhile.
            keep: Number of checkpoints that stay.

        Returns:
            False if the state has changed meanwhile: nothing is published.

        Raises:
            SupersededError: The newest start in the directory does not have this checkpoint on its line.
            CheckpointError, OSError: It cannot be written.
        """
        self._require_line(checkpoint)
        final = self.path_of(checkpoint)
        if final.exists():
            return True
        part = self.path / f".{final.name}.{os.urandom(8).hex()}"
        try:
            part.mkdir()
            publish_file(part / _DESCRIPTION, write(part))
            if not is_unchanged():
                return False
            newest = self._require_line(checkpoint)
            try:
                part.rename(final)
            except OSError:
                # A directory that has files is not replaced, rename(2): another agent has written the same checkpoint.
                if not final.exists():
                    raise
            _sync(self.path)
        finally:
            shutil.rmtree(part, ignore_errors=True)
        for old in deletable(newest, self.present(), keep):
            self._delete(old)
        self._delete_unfinished(newest)
        return True

    def read(self, checkpoint: CheckpointId) -> dict[str, Any]:
        """Return the state of a checkpoint.

        Raises:
            CheckpointError: It cannot be read, or is of another version of slurm_elastic.
        """
        import torch

        path = self.path_of(checkpoint)
        try:
            content = json.loads((path / _DESCRIPTION).read_bytes())
            if content["version"] != _VERSION:
                raise CheckpointError(
                    f"{path} has version {content['version']} of {_DESCRIPTION}, not {_VERSION}; load it with"
                    " torch.distributed.checkpoint, or with the release of slurm_elastic that wrote it"
                )
            tensors = []
            for file, offset, length in content["tensors"]:
                if os.path.basename(file) != file:  # noqa: PTH119 (a name, not a path)
                    raise ValueError(f"{file} is no name of a file")
                with (path / file).open("rb") as opened:
                    opened.seek(offset)
                    loaded = torch.load(io.BytesIO(opened.read(length)), map_location="cpu", weights_only=True)
                tensors.append(loaded)
            return rebuild(content["state"], tensors)
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(f"{path} cannot be read: {error or type(error).__name__}; remove it") from error

    def _require_line(self, checkpoint: CheckpointId) -> Start:
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

    def _delete_unfinished(self, newest: Start) -> None:
        """Delete what writers that were killed have left. The group before the newest may be writing still."""
        before = newest.line[-1].start if newest.line else newest.number
        for name in list_names(self.path):
            found = _UNFINISHED.fullmatch(name)
            if found and int(found[1]) < before:
                shutil.rmtree(self.path / name, ignore_errors=True)
        for name in list_names(self.path):
            found = _START.fullmatch(name)
            on_line = {last.start for last in newest.line}
            if found and int(found[1]) < newest.number and int(found[1]) not in on_line:
                (self.path / name).unlink(missing_ok=True)


def describe_files(state: Any, tensors: list[tuple[str, int, int]]) -> bytes:
    """Return the description of a checkpoint.

    Args:
        state: As in the description of a snapshot.
        tensors: File, offset and length in bytes of each tensor.
    """
    return json.dumps({"version": _VERSION, "state": state, "tensors": tensors}).encode()


def _name(checkpoint: CheckpointId) -> str:
    return f"start-{checkpoint.start:06d}.step-{checkpoint.step:012d}"


def _sync(directory: Path) -> None:
    with contextlib.suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
