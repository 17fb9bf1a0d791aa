"""Memory barriers that the agent executes in its workers, so that the workers execute none themselves.

A worker writes the number of its boundary and then reads the flag; the agent writes the flag and then reads the number.
With a full memory barrier between the two on both sides, at least one of them sees what the other one wrote. The worker
does this at every step and the agent once in hours, so the agent pays for both barriers, by membarrier(2).
"""

from __future__ import annotations

import os
import time

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


def has_membarrier() -> bool:
    """Return True if `register` works here, so that a barrier takes microseconds."""
    return register()


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
