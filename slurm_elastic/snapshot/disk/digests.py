"""Digests of a checkpoint. Its record, snapshot.json, has those of all files, and ends with a digest of itself.

A file of tensors has a digest for each piece, so that a rank checks what it reads and no more. A record without any
digest is of an earlier release; no single change turns one with digests into such a record.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from blake3 import blake3

from slurm_elastic import typed_json

_FIELD = b', "digest": "'


class DamagedError(Exception):
    """A file of a checkpoint is not as it was written."""


def digest(content: bytes | memoryview) -> str:
    """Return the digest of bytes."""
    return blake3(content).hexdigest()


def sealed(record: Mapping[str, Any]) -> bytes:
    """Return a record as JSON that ends with a digest of itself."""
    body = json.dumps(record).encode()[:-1]
    return b"".join((body, _FIELD, digest(body).encode(), b'"}'))


def unsealed(content: bytes) -> dict[str, Any]:
    """Return a record that `sealed` has made, or one of an earlier release.

    Raises:
        DamagedError: It is damaged.
    """
    body, _, end = content.rpartition(_FIELD)
    try:
        record = typed_json.loads(content)
    except ValueError as error:
        raise DamagedError(str(error)) from None
    if not isinstance(record, dict):
        raise DamagedError("no JSON object")
    if end != f'{digest(body)}"}}'.encode() and {"digest", "pieces", "records"} & record.keys():
        raise DamagedError("a wrong digest")
    return record


def pieces(path: Path, places: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int, str]]:
    """Yield offset, length and digest of each piece of a file: of these places, and of what is between them.

    Args:
        path: The file.
        places: Offsets and lengths, which do not overlap.
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
