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
import time
from typing import Protocol

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
ASKED = 6
"""Number of times that the agent has asked where the worker is, see `answers`."""
REASON = 8
"""The reason of the stop: text, in this field and the seven that follow."""
_TEXT_FIELDS = 8

# Written by the worker.
ATTACHED = 16
"""1: the worker uses the trainer API."""
REGISTERED = 17
"""1: the worker is registered for expedited barriers, see below."""
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
"""1: SIGTERM has no effect on the worker, see `shield`."""
FIRST_TIME = 24
"""BOUNDARY_TIME of the first boundary; 0 before, and always from a worker with an older version of this package."""
FIRST_STEP = 25
"""STEP at the first boundary; NONE before."""
LOSS = 26
"""The loss that the script reported last: the bits of a double, see `float_bits`."""
LOSS_STEP = 27
"""The step of that loss; NONE before."""
SAVE_TIME = 28
"""Nanoseconds from the last boundary to the report of the newest checkpoint; 0 before."""
AWAITED = 29
"""The time since which its first boundary is awaited, in nanoseconds of the node's monotonic clock; 0 if a loop or a
framework comes to it by itself."""

MEASURED = 32
"""1: the fields below are measured, in nanoseconds."""
USES = (33, 34, 35, 36)
"""Time that the worker has waited in collectives (NONE if that is unknown), for input, saved and read checkpoints."""
WAITING, LOADING, SAVING, RESTORING = USES
FIRST_USES = (37, 38, 39, 40)
"""The same at the first boundary."""

# Written by a thread of the worker, see `answers`.
IN_COLLECTIVE = 41
"""1 if the main thread was in a collective when the agent asked, 0 if not; NONE if that is unknown."""
ANSWERED = 42
"""The value of ASKED to which IN_COLLECTIVE and PLACE are the answer, or `LAST_ANSWER`."""
DUMPED = 43
"""The same when COLLECTIVES and the dumps are written, too."""
LAST_ANSWER = 2**62
"""The worker ends, and has written its last dump."""
ANSWERER = 44
"""Id of the process whose thread answers: the worker, or the program that a wrapper script has started; 0 if none does.
"""
PLACE = 48
"""The line of the script at which the main thread was: text, in this field and the seven that follow."""
COLLECTIVES = 56
"""The last collective of each process group: JSON, in this field and those that follow; empty if it is unknown."""
COLLECTIVES_FIELDS = 64

Collective = tuple[str, int, str]
"""The last collective that a rank has begun in a process group: name of the group, sequence number, operation."""


class Fields(Protocol):
    """The fields of a page: of shared memory, or in a simulation."""

    def __getitem__(self, index: int, /) -> int: ...

    def __setitem__(self, index: int, value: int, /) -> None: ...


def new_page(descriptor: int) -> Fields:
    """Map the page of a new worker onto an empty file; raises OSError."""
    # With its memory, not only sized: a full disk is an error here; later it would be SIGBUS in the worker (mmap(2)).
    os.posix_fallocate(descriptor, 0, SIZE)
    fields = _map(descriptor)
    for field in (DEADLINE, STEP, CHECKPOINT, FIRST_STEP, LOSS_STEP):
        fields[field] = NONE
    fields[_VERSION] = _VERSION_VALUE
    fields[_MAGIC] = _MAGIC_VALUE
    return fields


def map_page(path: str) -> Fields:
    """Map a page that an agent has made; raises OSError, or ValueError if the file is no page of this version."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        status = os.fstat(descriptor)
        if status.st_size != SIZE or not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{path} is no control page")
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            # Its agent makes it for this user alone.
            raise ValueError(f"{path} belongs to another user, or is open to others")
        fields = _map(descriptor)
    finally:
        os.close(descriptor)
    if fields[_MAGIC] != _MAGIC_VALUE:
        raise ValueError(f"{path} is no control page")
    if fields[_VERSION] != _VERSION_VALUE:
        raise ValueError(
            f"{path} has version {fields[_VERSION]}, not {_VERSION_VALUE}: the agent and this script use "
            "different versions of slurm_elastic"
        )
    return fields


def write_text(fields: Fields, text: str, first: int = REASON, count: int = _TEXT_FIELDS) -> None:
    """Write a text into `count` fields, cut to eight bytes per field."""
    content = text.encode(errors="replace")[: 8 * count].ljust(8 * count, b"\0")
    for index in range(count):
        fields[first + index] = int.from_bytes(content[8 * index : 8 * index + 8], sys.byteorder, signed=True)


def read_text(fields: Fields, first: int = REASON, count: int = _TEXT_FIELDS) -> str:
    """Return the text in `count` fields."""
    numbers = (fields[first + index] for index in range(count))
    content = b"".join(number.to_bytes(8, sys.byteorder, signed=True) for number in numbers)
    return content.rstrip(b"\0").decode(errors="ignore")


def float_bits(value: float) -> int:
    """Return the bits of a double as a field holds them."""
    return int(struct.unpack("=q", struct.pack("=d", value))[0])


def bits_float(bits: int) -> float:
    """Return the double that a field holds."""
    return float(struct.unpack("=d", struct.pack("=q", bits))[0])


def _map(descriptor: int) -> Fields:
    return memoryview(mmap.mmap(descriptor, SIZE)).cast("q")


# Memory barriers, by membarrier(2). A worker needs one at every step and the agent one in hours, so the agent executes
# those of its workers, too.
_NUMBERS = {"x86_64": 324, "aarch64": 283, "riscv64": 283, "ppc64le": 365, "s390x": 356}
"""Numbers of the system call, by machine; glibc has no function for it."""
_GLOBAL = 1
_GLOBAL_EXPEDITED = 2
_REGISTER_GLOBAL_EXPEDITED = 4
_DRAINED = 0.05
"""Seconds after which a processor has written out its store buffer. It does so within a microsecond, but no manual
gives an upper bound."""


def register() -> bool:
    """Allow other processes to execute barriers in this one by an interrupt, which takes them a microsecond."""
    return _membarrier(_REGISTER_GLOBAL_EXPEDITED)


def full_barrier(registered: bool) -> None:
    """Return when this thread and every running thread of the workers has executed a full memory barrier.

    Args:
        registered: True if `register` has returned True in all workers. Otherwise the kernel waits until each processor
            of the machine has been scheduled, which takes about 10 ms, and which it refuses where processors are kept
            free of the tick (nohz_full). Without membarrier (Linux before 4.3, a seccomp filter) this waits longer than
            any processor keeps a store back.
    """
    if not (registered and _membarrier(_GLOBAL_EXPEDITED)) and not _membarrier(_GLOBAL):
        time.sleep(_DRAINED)


def _membarrier(command: int) -> bool:
    number = _NUMBERS.get(os.uname().machine)
    if number is None:
        return False
    # Imported here: a script that no agent has started does not need it.
    import ctypes

    return bool(ctypes.CDLL(None).syscall(number, command, 0, 0) == 0)
