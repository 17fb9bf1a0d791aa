"""A memory barrier in other processes, so that they need none.

A worker writes the number of its boundary and then reads the flag; the agent writes the flag and then reads the number.
With a full barrier between the two on both sides, at least one of them sees what the other wrote. The worker passes
here at every step and the agent once in hours: so the agent pays for both, with membarrier(2).
"""

from __future__ import annotations

import os
import time

__all__ = ["full_barrier", "register"]

_NUMBERS = {"x86_64": 324, "aarch64": 283, "riscv64": 283, "ppc64le": 365, "s390x": 356}
"""Of the system call; glibc has no function for it."""
_GLOBAL = 1
_GLOBAL_EXPEDITED = 2
_REGISTER_GLOBAL_EXPEDITED = 4
_DRAINED = 0.05
"""Seconds. A processor writes out what it has buffered as soon as it can, well within a microsecond; but no manual says
by when at the latest."""


def register() -> bool:
    """Let others have barriers executed in this process by interrupting it; that takes them a microsecond."""
    return _membarrier(_REGISTER_GLOBAL_EXPEDITED)


def full_barrier(registered: bool) -> None:
    """Return when every running thread of the workers has executed a full memory barrier, and this one, too.

    Args:
        registered: whether all workers have called `register` with success. Otherwise the kernel waits until each
            processor of the machine has been scheduled, which takes some 10 ms, and which it refuses where processors
            are kept free of the tick (nohz_full). Without membarrier (Linux before 4.3, a seccomp filter) this waits
            longer than any processor keeps a store back.
    """
    if not (registered and _membarrier(_GLOBAL_EXPEDITED)) and not _membarrier(_GLOBAL):
        time.sleep(_DRAINED)


def _membarrier(command: int) -> bool:
    number = _NUMBERS.get(os.uname().machine)
    if number is None:
        return False
    # Here, as a script that is not started by an agent should not pay for it.
    import ctypes

    return bool(ctypes.CDLL(None).syscall(number, command, 0, 0) == 0)
