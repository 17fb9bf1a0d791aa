"""The page of memory that an agent shares with one worker: 8-byte fields, each written by one side only.

CPython copies an item of a memoryview of format ``q`` with a memcpy of constant size (Objects/memoryobject.c,
pack_single and unpack_single), which compilers turn into one load or store. Items are aligned, so no reader ever sees
half a number. Fields of the agent and fields of the worker lie in different cache lines.
"""

from __future__ import annotations

import mmap
import os
import stat
import struct
import sys
from typing import Protocol

__all__ = [
    "ATTACHED",
    "BOUNDARY",
    "BOUNDARY_TIME",
    "CHECKPOINT",
    "DEADLINE",
    "FENCED",
    "FIRST_STEP",
    "FIRST_TIME",
    "HOLD",
    "LOSS",
    "LOSS_STEP",
    "NONE",
    "REASON",
    "REGISTERED",
    "SHIELDED",
    "STEP",
    "STOP",
    "STOPPED",
    "Fields",
    "PageError",
    "bits_float",
    "float_bits",
    "map_page",
    "new_page",
    "read_text",
    "write_text",
]

SIZE = mmap.PAGESIZE
NONE = -(2**63)
"""The value of a field that is not set."""

_MAGIC, _VERSION = 0, 1
_MAGIC_VALUE = int.from_bytes(b"slurm_el", "little")
_VERSION_VALUE = 1

# Written by the agent.
HOLD = 2
"""1: the worker waits at its next boundary until STOP is set or this is 0 again."""
STOP = 3
"""The boundary at which the worker stops; 0 for none. Boundaries are counted from 1."""
DEADLINE = 4
"""The time at which the worker is killed, in nanoseconds of the node's monotonic clock; NONE for no such time."""
FENCED = 5
"""1: another group of workers may be training; the worker publishes nothing."""
REASON = 8
"""The reason of the stop: text, in this field and the seven that follow."""
_REASON_FIELDS = 8

# Written by the worker.
ATTACHED = 16
"""1: the worker uses the trainer API."""
REGISTERED = 17
"""1: the worker is registered for expedited barriers, see `_membarrier`."""
BOUNDARY = 18
"""Number of boundaries that the worker has reached: calls of should_stop."""
BOUNDARY_TIME = 19
"""The time at which it reached the last one, in nanoseconds of the node's monotonic clock."""
STEP = 20
"""The step that the script reported last; NONE before."""
CHECKPOINT = 21
"""The step of the checkpoint that the script reported last; NONE before."""
STOPPED = 22
"""The boundary at which should_stop told it to stop; 0 before."""
SHIELDED = 23
"""1: SIGTERM has no effect on the worker, see `_signal_shield`."""
FIRST_TIME = 24
"""BOUNDARY_TIME of the first boundary; 0 before, and always from a worker with an older version of this package."""
FIRST_STEP = 25
"""STEP at the first boundary; NONE before."""
LOSS = 26
"""The loss that the script reported last: the bits of a double, see `float_bits`."""
LOSS_STEP = 27
"""The step of that loss; NONE before."""


class PageError(Exception):
    """Raised for a file that is no control page of this version."""


class Fields(Protocol):
    """The fields of a page: of shared memory, or in a simulation."""

    def __getitem__(self, index: int, /) -> int: ...

    def __setitem__(self, index: int, value: int, /) -> None: ...


def new_page(descriptor: int) -> Fields:
    """Map the page of a new worker onto an empty file.

    Raises:
        OSError: The page cannot be made.
    """
    # Written, not only sized: a full disk is an error here; later it would be SIGBUS in the worker (mmap(2)).
    view = memoryview(bytes(SIZE))
    while view:
        view = view[os.write(descriptor, view) :]
    fields = _map(descriptor)
    for field in (DEADLINE, STEP, CHECKPOINT, FIRST_STEP, LOSS_STEP):
        fields[field] = NONE
    fields[_VERSION] = _VERSION_VALUE
    fields[_MAGIC] = _MAGIC_VALUE
    return fields


def map_page(path: str) -> Fields:
    """Map a page that an agent has made.

    Raises:
        OSError: The file does not exist or cannot be mapped.
        PageError: The file is no control page of this version.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        status = os.fstat(descriptor)
        if status.st_size != SIZE or not stat.S_ISREG(status.st_mode):
            raise PageError(f"{path} is no control page")
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            # Its agent makes it for this user alone.
            raise PageError(f"{path} belongs to another user, or is open to others")
        fields = _map(descriptor)
    finally:
        os.close(descriptor)
    if fields[_MAGIC] != _MAGIC_VALUE:
        raise PageError(f"{path} is no control page")
    if fields[_VERSION] != _VERSION_VALUE:
        raise PageError(
            f"{path} has version {fields[_VERSION]}, not {_VERSION_VALUE}: the agent and this script use "
            "different versions of slurm_elastic"
        )
    return fields


def write_text(fields: Fields, text: str) -> None:
    """Write the reason, cut to 64 bytes."""
    content = text.encode()[: 8 * _REASON_FIELDS].ljust(8 * _REASON_FIELDS, b"\0")
    for index in range(_REASON_FIELDS):
        fields[REASON + index] = int.from_bytes(content[8 * index : 8 * index + 8], sys.byteorder, signed=True)


def read_text(fields: Fields) -> str:
    """Read the reason."""
    numbers = (fields[REASON + index] for index in range(_REASON_FIELDS))
    content = b"".join(number.to_bytes(8, sys.byteorder, signed=True) for number in numbers)
    return content.rstrip(b"\0").decode(errors="ignore")


def float_bits(value: float) -> int:
    """Return the bits of a double as a field holds them."""
    return int(_INTEGER.unpack(_DOUBLE.pack(value))[0])


def bits_float(bits: int) -> float:
    """Return the double that a field holds."""
    return float(_DOUBLE.unpack(_INTEGER.pack(bits))[0])


_DOUBLE, _INTEGER = struct.Struct("=d"), struct.Struct("=q")


def _map(descriptor: int) -> Fields:
    return memoryview(mmap.mmap(descriptor, SIZE)).cast("q")
