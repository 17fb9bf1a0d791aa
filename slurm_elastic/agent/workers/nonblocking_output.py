"""Non-blocking stdout and stderr: the agent drops output rather than wait for a stalled reader, or fail on a full disk.

Under srun both are pipes to slurmstepd, which forwards their content to srun on the job's first node. When that node
stops answering, as in a power loss, slurmstepd stops reading once its buffers are full (io.c of slurmd,
STDIO_MAX_FREE_BUF), within seconds if workers write much. A process that writes to the pipe then blocks until TCP gives
up, many minutes later.
"""

from __future__ import annotations

import atexit
import collections
import io
import logging
import os
import select
import stat
import sys
import threading
import time
from typing import TextIO

_CAPACITY = 1 << 20
"""Bytes that wait for the reader at most; lines beyond that are dropped, unless a single line is longer."""
_DISK_TIMEOUT = 60.0
"""Seconds after which a disk counts as stalled."""
_FINISH_TIMEOUT = 5.0
"""Seconds to write out the rest at the end of the process, as long as the reader reads."""


class NonblockingStream(io.TextIOBase):
    """A stream to a descriptor; a thread writes to it, and writers do not wait for that thread.

    Args:
        descriptor: The descriptor, which stays open as long as the stream is used.
        stalled_after: Seconds without progress after which the reader counts as stalled.
    """

    def __init__(self, descriptor: int, stalled_after: float = 1.0) -> None:
        self._descriptor, self._stalled_after = descriptor, stalled_after
        self._changed = threading.Condition()
        self._waiting: collections.deque[bytes] = collections.deque()
        self._size = 0
        self._progress_at = time.monotonic()
        self._dropped, self._why = 0, ""
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

    @property
    def pending(self) -> int:
        """The number of bytes that the thread has not written yet."""
        with self._changed:
            return self._size

    def write(self, text: str) -> int:
        """Pass the text to the thread that writes, in one piece. Returns at once."""
        data = text.encode(errors="backslashreplace")
        with self._changed:
            if self._waiting and self._size + len(data) > _CAPACITY:
                self._dropped, self._why = self._dropped + 1, "srun, or the disk, did not take them"
            elif data:
                if not self._waiting:
                    self._progress_at = time.monotonic()
                self._waiting.append(data)
                self._size += len(data)
                if self._thread is None:
                    self._thread = threading.Thread(target=self._flush, name="slurm-elastic-output", daemon=True)
                    self._thread.start()
                self._changed.notify_all()
        return len(text)

    def wait_for_room(self) -> None:
        """Wait until half of the capacity is free, or the reader is stalled; for a writer that can wait."""
        self._wait(_CAPACITY // 2, None)

    def finish(self, seconds: float = _FINISH_TIMEOUT) -> None:
        """Wait until everything is written, up to `seconds`, but never for a stalled reader."""
        self._wait(0, seconds)

    def _wait(self, size: int, seconds: float | None) -> None:
        end = None if seconds is None else time.monotonic() + seconds
        with self._changed:
            while self._size > size:
                stalled_at = self._progress_at + self._stalled_after
                until = stalled_at if end is None else min(stalled_at, end)
                left = until - time.monotonic()
                if left <= 0:
                    return
                self._changed.wait(left)

    def _flush(self) -> None:
        while True:
            with self._changed:
                while not self._waiting:
                    self._changed.wait()
                data = self._waiting[0]
            why = self._write(data)
            with self._changed:
                self._size -= len(self._waiting.popleft())
                self._progress_at = time.monotonic()
                if why:
                    self._dropped, self._why = self._dropped + 1, why
                elif self._dropped and not self._waiting:
                    line = f"[slurm-elastic] {self._dropped} pieces of output dropped here: {self._why}\n"
                    self._dropped = 0
                    self._waiting.append(line.encode())
                    self._size += len(line)
                self._changed.notify_all()

    def _write(self, data: bytes) -> str:
        """Write a piece; return why that is not possible: the reader has closed its end, or a disk is full."""
        try:
            while data:
                try:
                    data = data[os.write(self._descriptor, data) :]
                    self._progress_at = time.monotonic()
                except BlockingIOError:
                    # Another process with this pipe may have made it non-blocking.
                    select.select([], [self._descriptor], [])
        except OSError as error:
            return str(error.strerror)
        return ""


def make_output_nonblocking() -> None:
    """Replace sys.stdout and sys.stderr by non-blocking streams, by one if they lead to one file; terminals stay."""
    made: dict[tuple[int, int], NonblockingStream] = {}
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        status = _status(stream)
        if status is not None:
            stream.flush()
            place = status.st_dev, status.st_ino
            if place not in made:
                is_pipe = stat.S_ISFIFO(status.st_mode) or stat.S_ISSOCK(status.st_mode)
                made[place] = NonblockingStream(stream.fileno(), *(() if is_pipe else (_DISK_TIMEOUT,)))
                atexit.register(made[place].finish)
            setattr(sys, name, made[place])
            _move_loggers(stream, made[place])


def _status(stream: TextIO | None) -> os.stat_result | None:
    """Return where a stream leads; None if it is to stay."""
    try:
        if isinstance(stream, io.TextIOWrapper) and not stream.isatty():
            return os.fstat(stream.fileno())
    except (OSError, ValueError):
        pass
    return None


def _move_loggers(old: TextIO, new: NonblockingStream) -> None:
    """Let log handlers that were made for the old stream, as by torch at its import, write to the new one."""
    loggers = [logging.getLogger(), *(other for other in logging.root.manager.loggerDict.values())]
    for logger in loggers:
        for handler in getattr(logger, "handlers", ()):
            if isinstance(handler, logging.StreamHandler) and handler.stream is old:
                handler.setStream(new)
