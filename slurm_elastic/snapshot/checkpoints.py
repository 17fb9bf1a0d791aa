"""A directory of checkpoints on disk, which all nodes see.

::

    start-000008.json                       one per group of workers that started: see checkpoint_lineage.py
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
import io
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from slurm_elastic import typed_json
from slurm_elastic.rundir import claim_file, list_names, read_file
from slurm_elastic.snapshot.checkpoint_digests import DamagedError, digest, sealed, unsealed
from slurm_elastic.snapshot.checkpoint_lineage import (
    CheckpointId,
    Start,
    checkpoint_between,
    choose_checkpoint,
    deletable,
    line_from_checkpoint,
    line_from_memory,
    read_start,
    write_start,
)
from slurm_elastic.snapshot.lineage import SnapshotId
from slurm_elastic.snapshot.sharding import Layout, Piece

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("slurm_elastic")

_START = re.compile(r"start-(\d{6,})\.json")
_CHECKPOINT = re.compile(r"start-(\d{6,})\.step-(\d{12,})")
_UNFINISHED = re.compile(r"\.start-(\d{6,})\.step-(\d{12,})\.\w+")
DESCRIPTION = "snapshot.json"
"""Name of the description, which is written when the state of all ranks is complete."""
_VERSIONS = (1, 2)
"""The first one has no parts."""
_DAMAGED = ".damaged"
"""The end of the name of a checkpoint that is set aside."""
_PART = re.compile(r"part-(\d{6,})\.json")
_PAUSE = 0.1


class CheckpointError(Exception):
    """A checkpoint cannot be read or written."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint is not as it was written; `Checkpoints.mark_damaged` takes it out of the way."""


class SupersededError(CheckpointError):
    """Another group of workers has started in the directory, from a state without this checkpoint."""


class Checkpoints:
    """The checkpoints in a directory.

    Args:
        path: Of the directory.
    """

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
            run: Id of the run; empty outside of a run.
            round_: Number of the round.
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
                starts = [*self._on_line(newest)]
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
        while numbers := [int(match[1]) for name in list_names(self.path) if (match := _START.fullmatch(name))]:
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
        matches = (_CHECKPOINT.fullmatch(name) for name in list_names(self.path))
        return [CheckpointId(int(match[1]), int(match[2])) for match in matches if match]

    def mark_damaged(self, checkpoint: CheckpointId, why: str) -> None:
        """Take a damaged checkpoint out of the way of all groups that start from now on.

        Raises:
            CheckpointError: It stays in the way.
        """
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
        matches = {name: _CHECKPOINT.fullmatch(name.removesuffix(_DAMAGED)) for name in list_names(self.path)}
        return sorted(
            name
            for name, match in matches.items()
            if match
            and name.endswith(_DAMAGED)
            and (newest is None or newest.has(CheckpointId(int(match[1]), int(match[2]))))
        )

    def path_of(self, checkpoint: CheckpointId) -> Path:
        """Return the directory of a checkpoint."""
        return self.path / _name(checkpoint)

    def unfinished(self, checkpoint: CheckpointId, writer: int) -> Path:
        """Return the directory in which agents write a checkpoint; it is made if it is missing.

        Args:
            checkpoint: To write.
            writer: Number of the start of the group that writes, in the directory.

        Raises:
            SupersededError: The newest start in the directory does not have this checkpoint on its line.
            CheckpointError, OSError: It cannot be made.
        """
        self.require_line(checkpoint)
        path = self._unfinished(checkpoint, writer)
        path.mkdir(exist_ok=True)
        return path

    def publish(self, checkpoint: CheckpointId, writer: int, finish: Callable[[Path], bool], keep: int) -> bool:
        """Give a checkpoint its name if it is complete, and delete those that are not needed any more.

        Args:
            checkpoint: To publish.
            writer: See :meth:`unfinished`.
            finish: Finishes what was written in a directory; returns False if it is not complete.
            keep: Number of checkpoints that stay.

        Returns:
            False if the checkpoint is not complete.

        Raises:
            SupersededError: The newest start in the directory does not have this checkpoint on its line.
            CheckpointError, OSError: It cannot be written.
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
            _sync(self.path)
        shutil.rmtree(part, ignore_errors=True)
        for old in deletable(newest, self.present(), keep):
            self._delete(old)
        self._delete_unfinished(newest, checkpoint)
        return True

    def unfinished_size(self, checkpoint: CheckpointId, writer: int) -> int | None:
        """Return the bytes that agents have written of a checkpoint; None if they have completed it or given it up."""
        part = self._unfinished(checkpoint, writer)
        return directory_size(part) if part.name in list_names(self.path) else None

    def discard(self, checkpoint: CheckpointId, writer: int) -> None:
        """Delete what was written of a checkpoint that is not completed."""
        shutil.rmtree(self._unfinished(checkpoint, writer), ignore_errors=True)

    def _unfinished(self, checkpoint: CheckpointId, writer: int) -> Path:
        return self.path / f".{_name(checkpoint)}.{writer:06d}"

    def read(self, checkpoint: CheckpointId) -> Stored:
        """Return the state of a checkpoint; shards, and what ranks had of their own, are read when they are asked for.

        Raises:
            CheckpointError: It cannot be read, or is of another version of slurm_elastic.
        """
        if checkpoint not in self._stored:
            # One only: it has the tensors of the state.
            self._stored = {checkpoint: Stored(self.path_of(checkpoint))}
            if not self._stored[checkpoint].has_digests and os.environ.get("RANK", "0") == "0":
                path = self.path_of(checkpoint)
                logger.warning("%s is of an earlier release and has no digests: it is loaded unchecked", path)
        return self._stored[checkpoint]

    def require_line(self, checkpoint: CheckpointId) -> Start:
        """Return the newest start, which has this checkpoint on its line.

        Raises:
            SupersededError: It does not.
            CheckpointError, OSError: The directory cannot be read.
        """
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

    def _delete_unfinished(self, newest: Start, written: CheckpointId) -> None:
        """Delete what has not been completed. The group before the newest may be writing still."""
        before = newest.line[-1].start if newest.line else newest.number
        for name in list_names(self.path):
            match = _UNFINISHED.fullmatch(name)
            if match is None:
                continue
            unfinished = CheckpointId(int(match[1]), int(match[2]))
            if unfinished.start < before or (unfinished.start == written.start and unfinished < written):
                shutil.rmtree(self.path / name, ignore_errors=True)
        for name in list_names(self.path):
            match = _START.fullmatch(name)
            on_line = {last.start for last in newest.line}
            if match and int(match[1]) < newest.number and int(match[1]) not in on_line:
                (self.path / name).unlink(missing_ok=True)


class Stored:
    """The state of a checkpoint.

    Args:
        path: Of the checkpoint.
        load: False to compare its files with their digests only.

    Raises:
        CheckpointError: It cannot be read, or is of another version of slurm_elastic.
    """

    def __init__(self, path: Path, *, load: bool = True) -> None:
        self._path = path
        with self._reading():
            content = unsealed((path / DESCRIPTION).read_bytes())
            if content["version"] not in _VERSIONS:
                raise CheckpointError(
                    f"{path} has version {content['version']} of {DESCRIPTION}, not {_VERSIONS[-1]}; load it with"
                    " torch.distributed.checkpoint, or with the release of slurm_elastic that wrote it"
                )
            self.tree: dict[str, Any] = content["state"]
            """The state, with indices in the places of tensors."""
            self.layout = typed_json.convert(content.get("layout"), Layout | None)
            """Of its sharded tensors; None if it has none, and ranks had no state of their own."""
            self.has_digests = "records" in content
            """False for a checkpoint of an earlier release, which is loaded unchecked."""
            self._records: dict[str, str] = content.get("records", {})
            self._digests: dict[tuple[str, int, int], str] = {}
            tensors = [(file, offset, length) for file, offset, length in content["tensors"]]
            if self.has_digests:
                self._read_record(".metadata")
                for file, pieces in content["pieces"].items():
                    self._digests |= {(file, offset, length): code for offset, length, code in pieces}
                # What only torch reads lies between the tensors.
                for place in self._digests.keys() - (set(tensors) if load else set()):
                    self._read(*place)
            self.tensors: list[torch.Tensor] = self._load_all(tensors) if load else []
        self._parts: dict[int, StoredPart] = {}

    def check(self) -> None:
        """Read all parts, too.

        Raises:
            CheckpointError: A file is damaged.
        """
        with self._reading():
            for name in self._records:
                if (match := _PART.fullmatch(name)) is not None:
                    for offset, length, _ in self._part(int(match[1])).pieces:
                        self._read(part_file(int(match[1])), offset, length)

    def expect(self, pieces: Iterable[tuple[int, Piece]]) -> None:
        """Do nothing: the file of a part is mapped, and of that only what is read comes from the disk."""

    def shard(self, index: int, piece: Piece) -> torch.Tensor:
        """Return the shard of a sharded tensor to which these elements belong."""
        with self._reading():
            place = self._part(piece.part).shards[index]
            if place is None:
                raise ValueError(f"part {piece.part} has no elements of tensor {index}")
            shard: torch.Tensor = self._load(part_file(piece.part), *place)
            return shard

    def own(self, rank: int) -> dict[str, Any]:
        """Return what a rank had of its own."""
        with self._reading():
            place = self._part(rank).own
            if place is None:
                raise ValueError(f"part {rank} has no state of the rank's own")
            content: dict[str, Any] = self._load(part_file(rank), *place)
            return content

    def _part(self, number: int) -> StoredPart:
        if number not in self._parts:
            part = self._parts[number] = typed_json.decode(self._read_record(part_record(number)), StoredPart)
            self._digests |= {(part_file(number), offset, length): code for offset, length, code in part.pieces}
        return self._parts[number]

    def _read_record(self, name: str) -> bytes:
        content = (self._path / name).read_bytes()
        if self.has_digests and digest(content) != self._records.get(name):
            raise DamagedError(f"{name} has a wrong digest")
        return content

    def _load_all(self, places: Sequence[tuple[str, int, int]]) -> list[torch.Tensor]:
        tensors: list[torch.Tensor] = []
        # The next one is read while one is compared with its digest and copied.
        with ThreadPoolExecutor(1) as reader:
            ahead = [reader.submit(self._bytes, *place) for place in places[:1]]
            for number, place in enumerate(places, 1):
                content = ahead.pop().result()
                ahead = [reader.submit(self._bytes, *following) for following in places[number : number + 1]]
                tensors.append(_tensors_in(self._checked(content, *place)))
        return tensors

    def _load(self, file: str, offset: int, length: int) -> Any:
        return _tensors_in(self._read(file, offset, length))

    def _read(self, file: str, offset: int, length: int) -> bytes:
        return self._checked(self._bytes(file, offset, length), file, offset, length)

    def _bytes(self, file: str, offset: int, length: int) -> bytes:
        if os.path.basename(file) != file:  # noqa: PTH119 (a name, not a path)
            raise ValueError(f"{file} is no name of a file")
        with (self._path / file).open("rb") as opened:
            opened.seek(offset)
            return opened.read(length)

    def _checked(self, content: bytes, file: str, offset: int, length: int) -> bytes:
        if self.has_digests and digest(content) != self._digests.get((file, offset, length)):
            raise DamagedError(f"{file} has a wrong digest at byte {offset}")
        return content

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except CheckpointError:
            raise
        except (DamagedError, FileNotFoundError) as error:
            raise DamagedCheckpointError(f"{self._path} is damaged: {error}") from error
        except Exception as error:
            why = error or type(error).__name__
            raise CheckpointError(f"{self._path} cannot be read: {why}; remove it") from error


def _tensors_in(content: bytes) -> Any:
    import torch

    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


class StoredPart(msgspec.Struct, frozen=True):
    """The record of a part of a checkpoint: offset and length in its file.

    Attributes:
        shards: Of the shard of each sharded tensor; None where the part has no elements.
        own: Of the state of the rank's own; None if ranks have none.
        pieces: With the digest of each piece of the file; empty from an earlier release.
    """

    shards: tuple[tuple[int, int] | None, ...]
    own: tuple[int, int] | None = None
    pieces: tuple[tuple[int, int, str], ...] = ()


def directory_size(directory: Path) -> int:
    """Return the bytes of all files in a directory."""
    size = 0
    for name in list_names(directory):
        with contextlib.suppress(FileNotFoundError):
            size += (directory / name).stat().st_size
    return size


def describe_files(
    state: Any,
    tensors: list[tuple[str, int, int]],
    layout: Layout | None,
    digests: Mapping[str, Sequence[tuple[int, int, str]]],
) -> bytes:
    """Return the description of a checkpoint.

    Args:
        state: As in the description of a snapshot.
        tensors: File, offset and length in bytes of each tensor.
        layout: Of its sharded tensors; None if it has no parts.
        digests: Offset, length and digest of each piece of these files.
    """
    described = {"version": _VERSIONS[-1], "state": state, "tensors": tensors, "layout": msgspec.to_builtins(layout)}
    return sealed({**described, "pieces": digests})


def part_file(number: int) -> str:
    """Return the name of the file of a part."""
    return f"part-{number:06d}.distcp"


def part_record(number: int) -> str:
    """Return the name of the record of a part, which is written when its file is complete."""
    return f"part-{number:06d}.json"


def _name(checkpoint: CheckpointId) -> str:
    return f"start-{checkpoint.start:06d}.step-{checkpoint.step:012d}"


def _sync(directory: Path) -> None:
    with contextlib.suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
