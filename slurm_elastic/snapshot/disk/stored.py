"""One checkpoint on disk: its description, its parts, and the checks before anything of it is used.

Its record, snapshot.json, has the digests of all files, and ends with a digest of itself. A file of tensors has a
digest for each piece, so that a rank checks what it reads and no more.
"""

from __future__ import annotations

import contextlib
import io
import json
import mmap
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from blake3 import blake3

from slurm_elastic import typed_json
from slurm_elastic.snapshot.disk.lineage import CheckpointId
from slurm_elastic.snapshot.sharding import Layout, Piece

if TYPE_CHECKING:
    import torch

DESCRIPTION = "snapshot.json"
"""Name of the description, which is written when the state of all ranks is complete."""
VERSION = 2
"""Of the description. Version 1 has no parts."""
_PART = re.compile(r"part-(\d{6,})\.json")
_FIELD = b', "digest": "'


class CheckpointError(Exception):
    """A checkpoint cannot be read or written."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint is not as it was written; `Checkpoints.mark_damaged` takes it out of the way."""


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
            if content["version"] not in (1, VERSION):
                raise CheckpointError(
                    f"{path} has version {content['version']} of {DESCRIPTION}, not {VERSION}; load it with"
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
        """Read all parts, too; raises CheckpointError if a file is damaged."""
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
            shard: torch.Tensor = _tensors_in(self._read(part_file(piece.part), *place))
            return shard

    def own(self, rank: int) -> dict[str, Any]:
        """Return what a rank had of its own."""
        with self._reading():
            place = self._part(rank).own
            if place is None:
                raise ValueError(f"part {rank} has no state of the rank's own")
            content: dict[str, Any] = _tensors_in(self._read(part_file(rank), *place))
            return content

    def _part(self, number: int) -> StoredPart:
        if number not in self._parts:
            part = self._parts[number] = typed_json.decode(self._read_record(part_record(number)), StoredPart)
            self._digests |= {(part_file(number), offset, length): code for offset, length, code in part.pieces}
        return self._parts[number]

    def _read_record(self, name: str) -> bytes:
        content = (self._path / name).read_bytes()
        if self.has_digests and digest(content) != self._records.get(name):
            raise DamagedCheckpointError(f"{name} has a wrong digest")
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
            raise DamagedCheckpointError(f"{file} has a wrong digest at byte {offset}")
        return content

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except (DamagedCheckpointError, FileNotFoundError) as error:
            raise DamagedCheckpointError(f"{self._path} is damaged: {error}") from error
        except CheckpointError:
            raise
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


def part_file(number: int) -> str:
    """Return the name of the file of a part."""
    return f"part-{number:06d}.distcp"


def part_record(number: int) -> str:
    """Return the name of the record of a part, which is written when its file is complete."""
    return f"part-{number:06d}.json"


def file_name(checkpoint: CheckpointId) -> str:
    """Return the name of the directory of a checkpoint."""
    return f"start-{checkpoint.start:06d}.step-{checkpoint.step:012d}"


def digest(content: bytes | memoryview) -> str:
    """Return the digest of bytes."""
    return blake3(content).hexdigest()


def sealed(record: Mapping[str, Any]) -> bytes:
    """Return a record as JSON that ends with a digest of itself."""
    body = json.dumps(record).encode()[:-1]
    return b"".join((body, _FIELD, digest(body).encode(), b'"}'))


def unsealed(content: bytes) -> dict[str, Any]:
    """Return a record that `sealed` has made, or one of an earlier release; raises DamagedCheckpointError.

    A record without any digest is of an earlier release; no single change turns one with digests into such a record.
    """
    body, _, end = content.rpartition(_FIELD)
    try:
        record = typed_json.loads(content)
    except ValueError as error:
        raise DamagedCheckpointError(str(error)) from None
    if not isinstance(record, dict):
        raise DamagedCheckpointError("no JSON object")
    if end != f'{digest(body)}"}}'.encode() and {"digest", "pieces", "records"} & record.keys():
        raise DamagedCheckpointError("a wrong digest")
    return record


def pieces_of(path: Path, places: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int, str]]:
    """Yield offset, length and digest of each piece of a file.

    Pieces are these places, which do not overlap, and what is between them.
    """
    with path.open("rb") as file:
        size = file.seek(0, 2)
        if not size:
            return
        with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped, memoryview(mapped) as view:
            begin = 0
            for offset, length in [*sorted(places), (size, 0)]:
                for start, end in ((begin, offset), (offset, offset + length)):
                    if start < end:
                        with view[start:end] as piece:
                            yield start, end - start, digest(piece)
                begin = offset + length
