"""Standard output and error of an agent, which hold it up for nobody.

Under srun both are pipes to slurmstepd, which sends on what it reads to srun on the job's first node. When that node
falls silent, as in a power loss, slurmstepd reads no more once its buffers are full of what waits for srun (io.c of
slurmd, STDIO_MAX_FREE_BUF), which takes seconds where workers say much. Whoever writes then waits until TCP gives up,
many minutes later.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import io
import logging
import os
import select
import stat
import sys
import threading
import time
from typing import TextIO

__all__ = ["Outlet", "hold_up_nobody"]

_MOST = 1 << 20
"""Bytes that wait for whoever reads; lines beyond that are left out, unless one alone is longer."""
_STALLED = 1.0
"""Seconds without progress after which nobody seems to read."""
_LAST_WORDS = 5.0
"""Seconds for what is left at the end, as long as somebody reads."""


class Outlet(io.TextIOBase):
    """A stream to a descriptor; a thread writes, and writers do not wait for it.

    Args:
        descriptor: open, for as long as this process lives.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._changed = threading.Condition()
        self._waiting: collections.deque[bytes] = collections.deque()
        self._size = 0
        self._progress_at = time.monotonic()
        self._left_out = 0
        self._thread: threading.Thread | None = None

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """See io.TextIOBase."""
        return "utf-8"

    def fileno(self) -> int:
        """See io.IOBase."""
        return self._descriptor

    def writable(self) -> bool:
        """See io.IOBase."""
        return True

    def write(self, text: str) -> int:
        """Have it written, in one piece. Returns at once."""
        data = text.encode(errors="backslashreplace")
        with self._changed:
            if self._waiting and self._size + len(data) > _MOST:
                self._left_out += 1
            elif data:
                if not self._waiting:
                    self._progress_at = time.monotonic()
                self._waiting.append(data)
                self._size += len(data)
                if self._thread is None:
                    self._thread = threading.Thread(target=self._write_out, name="slurm-elastic-outlet", daemon=True)
                    self._thread.start()
                self._changed.notify_all()
        return len(text)

    def wait_for_room(self) -> None:
        """For a writer that has time: wait until half of the room is free, or nobody seems to read."""
        self._wait(_MOST // 2, None)

    def finish(self, seconds: float = _LAST_WORDS) -> None:
        """Wait until everything is written, for at most so many seconds, and not where nobody seems to read."""
        self._wait(0, seconds)

    def _wait(self, size: int, seconds: float | None) -> None:
        end = None if seconds is None else time.monotonic() + seconds
        with self._changed:
            while self._size > size:
                stalled_at = self._progress_at + _STALLED
                until = stalled_at if end is None else min(stalled_at, end)
                left = until - time.monotonic()
                if left <= 0:
                    return
                self._changed.wait(left)

    def _write_out(self) -> None:
        while True:
            with self._changed:
                while not self._waiting:
                    self._changed.wait()
                data = self._waiting[0]
            with contextlib.suppress(OSError):
                # Else nobody reads any more, ever.
                while data:
                    try:
                        data = data[os.write(self._descriptor, data) :]
                        self._progress_at = time.monotonic()
                    except BlockingIOError:
                        # Somebody else who has this pipe may have made it so.
                        select.select([], [self._descriptor], [])
            with self._changed:
                self._size -= len(self._waiting.popleft())
                self._progress_at = time.monotonic()
                if self._left_out and not self._waiting:
                    line = f"[slurm-elastic] here {self._left_out} pieces of output are left out: nobody read them\n"
                    self._left_out = 0
                    self._waiting.append(line.encode())
                    self._size += len(line)
                self._changed.notify_all()


def hold_up_nobody() -> None:
    """Put outlets in the place of sys.stdout and sys.stderr where these are pipes; files and terminals stay."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if _is_pipe(stream):
            stream.flush()
            outlet = Outlet(stream.fileno())
            setattr(sys, name, outlet)
            atexit.register(outlet.finish)
            _move_loggers(stream, outlet)


def _is_pipe(stream: TextIO | None) -> bool:
    try:
        mode = os.fstat(stream.fileno()).st_mode if isinstance(stream, io.TextIOWrapper) else 0
    except (OSError, ValueError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


def _move_loggers(old: TextIO, new: Outlet) -> None:
    """Handlers that torch made when it was imported."""
    loggers = [logging.getLogger(), *(each for each in logging.root.manager.loggerDict.values())]
    for logger in loggers:
        for handler in getattr(logger, "handlers", ()):
            if isinstance(handler, logging.StreamHandler) and handler.stream is old:
                handler.setStream(new)
