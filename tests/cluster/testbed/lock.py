"""One owner at a time for a cluster's name."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator

from .settings import STATE


class Lock:
    """A lock that the kernel gives back when its holder dies, however it dies."""

    def __init__(self, name: str) -> None:
        self._path = STATE / f"{name}.lock"
        self._descriptor: int | None = None

    def acquire(self, *, wait: bool = True) -> bool:
        """Take the lock; False if `wait` is off and somebody else holds it."""
        while True:
            STATE.mkdir(mode=0o755, exist_ok=True)
            try:
                descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except FileNotFoundError:
                # The last one to leave removed the directory this moment.
                continue
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
                # Its last holder may have removed the file between our open and our lock.
                if os.fstat(descriptor).st_nlink:
                    self._descriptor = descriptor
                    return True
            except BlockingIOError:
                os.close(descriptor)
                return False
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)

    def release(self) -> None:
        """Give the lock back and leave no file behind."""
        if self._descriptor is not None:
            self._path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = None
            with contextlib.suppress(OSError):
                STATE.rmdir()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock for a block."""
        self.acquire()
        try:
            yield
        finally:
            self.release()
