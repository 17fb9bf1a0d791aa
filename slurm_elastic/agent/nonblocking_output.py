"""Non-blocking stdout and stderr: the agent drops output rather than wait for a stalled reader.

Under srun both are pipes to slurmstepd, which sends on what it reads to srun on the job's first node. When that node
falls silent, as in a power loss, slurmstepd reads no more once its buffers are full of what waits for srun (io.c of
slurmd, STDIO_MAX_FREE_BUF), which takes seconds where workers write much. A process that writes then waits until TCP
gives up, many minutes later.
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

__all__ = ["NonblockingStream", "make_output_nonblocking"]

_MOST = 1 << 20
"""Bytes that are kept for the reader; lines beyond that are dropped, unless one alone is longer."""
_STALLED = 1.0
"""Seconds without progress after which the reader counts as stalled."""
_LAST_WORDS = 5.0
"""Seconds for what is left at the end, as long as the reader reads."""


class NonblockingStream(io.TextIOBase):
    """A stream to a descriptor; a thread writes to it, and writers do not wait for that thread.

    Args:
        descriptor: open, for as long as this process lives.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._changed = threading.Condition()
        self._waiting: collections.deque[bytes] = collections.deque()
        self._size = 0
        self._progress_at = time.monotonic()
        self._dropped = 0
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
        """Pass the text to the thread that writes, in one piece. Returns at once."""
        data = text.encode(errors="backslashreplace")
        with self._changed:
            if self._waiting and self._size + len(data) > _MOST:
                self._dropped += 1
            elif data:
                if not self._waiting:
                    self._progress_at = time.monotonic()
                self._waiting.append(data)
                self._size += len(data)
                if self._thread is None:
                    self._thread = threading.Thread(target=self._write_out, name="slurm-elastic-output", daemon=True)
                    self._thread.start()
                self._changed.notify_all()
        return len(text)

    def wait_for_room(self) -> None:
        """Wait until half of the room is free, or the reader is stalled; for a writer that has time."""
        self._wait(_MOST // 2, None)

    def finish(self, seconds: float = _LAST_WORDS) -> None:
        """Wait until everything is written, for at most so many seconds, and not for a stalled reader."""
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
                # An error means that the reader has closed its end.
                while data:
                    try:
                        data = data[os.write(self._descriptor, data) :]
                        self._progress_at = time.monotonic()
                    except BlockingIOError:
                        # Another process that has this pipe may have made it non-blocking.
                        select.select([], [self._descriptor], [])
            with self._changed:
                self._size -= len(self._waiting.popleft())
                self._progress_at = time.monotonic()
                if self._dropped and not self._waiting:
                    line = f"[slurm-elastic] {self._dropped} pieces of output dropped here: srun did not read them\n"
                    self._dropped = 0
                    self._waiting.append(line.encode())
                    self._size += len(line)
                self._changed.notify_all()


def make_output_nonblocking() -> None:
    """Make sys.stdout and sys.stderr non-blocking where they are pipes; files and terminals stay."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if _is_pipe(stream):
            stream.flush()
            nonblocking = NonblockingStream(stream.fileno())
            setattr(sys, name, nonblocking)
            atexit.register(nonblocking.finish)
            _move_loggers(stream, nonblocking)


def _is_pipe(stream: TextIO | None) -> bool:
    try:
        mode = os.fstat(stream.fileno()).st_mode if isinstance(stream, io.TextIOWrapper) else 0
    except (OSError, ValueError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


def _move_loggers(old: TextIO, new: NonblockingStream) -> None:
    """Have the log handlers that torch made at its import write to the new stream."""
    loggers = [logging.getLogger(), *(each for each in logging.root.manager.loggerDict.values())]
    for logger in loggers:
        for handler in getattr(logger, "handlers", ()):
            if isinstance(handler, logging.StreamHandler) and handler.stream is old:
                handler.setStream(new)
