"""The output of workers and agent on the console: copied from logs, and written without waiting for a reader.

Under srun stdout and stderr are pipes to slurmstepd, which forwards their content to srun on the job's first node. When
that node stops answering, as in a power loss, slurmstepd stops reading once its buffers are full (io.c of slurmd,
STDIO_MAX_FREE_BUF), within seconds if workers write much. A process that writes to the pipe then blocks until TCP gives
up, many minutes later. So the agent drops output rather than wait for a stalled reader, or fail on a full disk.
"""

from __future__ import annotations

import atexit
import codecs
import collections
import contextlib
import io
import json
import logging
import os
import re
import select
import stat
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from slurm_elastic.ownership import write_own

_CAPACITY = 1 << 20
"""Bytes that wait for the reader at most; lines beyond that are dropped, unless a single line is longer."""
_READER_TIMEOUT, _DISK_TIMEOUT = 1.0, 60.0
"""Seconds after which the reader of a pipe counts as stalled, and after which a disk does."""
_FINISH_TIMEOUT = 5.0
"""Seconds to write out the rest at the end of the process, as long as the reader reads."""


class NonblockingStream(io.TextIOBase):
    """A stream to a descriptor; a thread writes to it, and writers do not wait for that thread.

    Args:
        stalled_after: Seconds without progress after which the reader counts as stalled.
    """

    def __init__(self, descriptor: int, stalled_after: float = _READER_TIMEOUT) -> None:
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

    def finish(self, seconds: float = _FINISH_TIMEOUT) -> bool:
        """Wait until everything is written, up to `seconds`, but never for a stalled reader; return True if it is."""
        return self._wait(0, seconds)

    def _wait(self, size: int, seconds: float | None) -> bool:
        end = None if seconds is None else time.monotonic() + seconds
        with self._changed:
            while self._size > size:
                stalled_at = self._progress_at + self._stalled_after
                until = stalled_at if end is None else min(stalled_at, end)
                left = until - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(left)
        return True

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
    made: dict[object, NonblockingStream] = {}
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper) and not stream.isatty():
            stream.flush()
            place = _place(stream)
            if place not in made:
                is_file = stat.S_ISREG(os.fstat(stream.fileno()).st_mode)
                made[place] = NonblockingStream(stream.fileno(), _DISK_TIMEOUT if is_file else _READER_TIMEOUT)
                atexit.register(made[place].finish)
            setattr(sys, name, made[place])
            _move_loggers(stream, made[place])


def _move_loggers(old: TextIO, new: NonblockingStream) -> None:
    """Let log handlers that were made for the old stream, as by torch at its import, write to the new one."""
    loggers = [logging.getLogger(), *(other for other in logging.root.manager.loggerDict.values())]
    for logger in loggers:
        for handler in getattr(logger, "handlers", ()):
            if isinstance(handler, logging.StreamHandler) and handler.stream is old:
                handler.setStream(new)


_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.02, 0.5
"""Seconds between two reads of the files: short while they grow, longer while they do not."""
_CHUNK = 1 << 16
_TIMES_PAUSE = 0.25
"""Seconds between two lines of the file of times, while the logs grow."""


_FIRST_WORDS = (
    "Traceback (most recent call last):",
    "terminate called after throwing",
    "ProcessGroupNCCL.cpp",
    "Fatal Python error: Aborted",
)
"""The beginnings of what workers write when they fail."""
_DECISION_TIMEOUT = 2.0
"""Seconds after which a worker that lives on after a traceback has survived what it tells of."""


class LastWords:
    """Holds back the last words of a worker, until it is known whether another one has made it fail."""

    def __init__(self, ended: Callable[[], bool], now: Callable[[], float] = time.monotonic) -> None:
        self._ended, self._now = ended, now
        self._text, self._since = "", 0.0
        self.is_consequence: Callable[[str], bool] = lambda _: False
        """Returns True if these last words are not shown; set before the end."""

    def filter(self, text: str, *, end: bool) -> str:
        """Take in what the worker has written, and return what is shown now."""
        shown = text
        if not self._text:
            places = [place for word in _FIRST_WORDS if (place := text.find(word)) >= 0]
            if not places:
                return text
            begin = text.rfind("\n", 0, min(places)) + 1
            shown, text, self._since = text[:begin], text[begin:], self._now()
        else:
            shown = ""
        self._text += text
        survived = not self._ended() and self._now() - self._since >= _DECISION_TIMEOUT
        if end or survived or len(self._text) > _CHUNK:
            last, self._text = self._text, ""
            if not end or not self.is_consequence(last):
                shown += last
        return shown


@dataclass(slots=True)
class FollowedFile:
    """One file to show.

    Attributes:
        words: Lines are shown that contain one of these; all for none.
        last_words: What holds back the last words of the worker; None if they are shown as they come.
    """

    path: str
    prefix: str
    destination: TextIO
    words: tuple[str, ...] = ()
    last_words: LastWords | None = None
    descriptor: int | None = field(default=None, init=False)
    _rest: str = field(default="", init=False)
    _last: str = field(default="\n", init=False)
    _decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"), init=False
    )

    def show(self, *, to_the_end: bool = False) -> bool:
        """Show what is new, and with `to_the_end` end the last line; return True if the file has grown."""
        has_lines = False
        # It does not exist yet, or a network file system does not answer for a moment.
        with contextlib.suppress(OSError):
            if self.descriptor is None:
                self.descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            while data := os.read(self.descriptor, _CHUNK):
                has_lines = True
                self._write(self._decoder.decode(data))
        if self.last_words is not None and not has_lines:
            self._write("")
        if to_the_end:
            self._write(self._decoder.decode(b"", final=True), end=True)
            if self.descriptor is not None:
                os.close(self.descriptor)
                self.descriptor = None
        return has_lines

    def _write(self, text: str, *, end: bool = False) -> None:
        if self.last_words is not None:
            text = self.last_words.filter(text, end=end)
        if self.words:
            *lines, self._rest = (self._rest + text).split("\n")
            if self._rest and (end or len(self._rest) > _CHUNK):
                lines, self._rest = [*lines, self._rest], ""
            text = "".join(line + "\n" for line in lines if any(word in line for word in self.words))
        if text:
            if isinstance(self.destination, NonblockingStream):
                self.destination.wait_for_room()
            # A terminal may be gone.
            with contextlib.suppress(OSError):
                self._show(text)
        if end:
            finish_line(self.destination, self)

    def _show(self, text: str) -> None:
        with _writing:
            place = _place(self.destination)
            if _unfinished.get(place, (self,))[0] is not self:
                finish_line(self.destination)
            # After a carriage return the prefix is drawn anew, with the rest of its line.
            begins = self._last in "\r\n" or place not in _unfinished
            begins = begins and text[0] != "\r" and self._last + text[0] != "\r\n"
            shown = _LINE_END.sub(lambda end: end[0] + self.prefix, text)
            self._last = text[-1]
            _unfinished[place] = self, self.destination
            if self._last == "\n":
                del _unfinished[place]
            self.destination.write(self.prefix + shown if begins else shown)
            self.destination.flush()


_LINE_END = re.compile(r"\n(?=[^\r])|\r(?=[^\r\n])")
"""The end of a line that is followed by text."""
_unfinished: dict[object, tuple[FollowedFile, TextIO]] = {}
"""The file whose last line has no end yet, by the place that it was shown at, and the stream to that."""
_writing = threading.RLock()


def finish_line(stream: TextIO, of: FollowedFile | None = None) -> None:
    """End the unfinished line of a worker, if the stream has one, before another line is written there."""
    with _writing, contextlib.suppress(OSError):
        place = _place(stream)
        if place in _unfinished and (of is None or _unfinished[place][0] is of):
            _, shown_by = _unfinished.pop(place)
            shown_by.write("\n")
            shown_by.flush()


def _place(stream: TextIO) -> object:
    """Return what two streams share that lead to the same file, terminal or pipe."""
    try:
        status = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return id(stream)
    return status.st_dev, status.st_ino


class LogTimes:
    """Records the sizes of a round's logs over time, as JSON lines: the logs themselves have no times.

    A line has the time of this node's clock in seconds, and the new sizes of the logs that have grown since the line
    before: ``{"time": 1764000000.123, "sizes": {"rank_03/stdout.log": 4711}}``. docs/events.md describes it.

    Args:
        logs: The logs of all ranks of this node; they need not exist yet.
        pause: The shortest time in seconds between two lines.
    """

    def __init__(self, path: str, logs: Sequence[str], pause: float = _TIMES_PAUSE) -> None:
        self._path, self._pause = path, pause
        self._logs = {f"{Path(log).parent.name}/{Path(log).name}": log for log in logs}
        self._sizes = dict.fromkeys(self._logs, 0)
        self._written = float("-inf")
        self._descriptor: int | None = None

    def show(self, *, to_the_end: bool = False) -> bool:
        """Write a line if logs have grown since the last one, at least `pause` seconds ago; return True if so.

        With `to_the_end` the last line is written at once, and the file closed.
        """
        now = time.monotonic()
        logs = self._logs if to_the_end or now - self._written >= self._pause else {}
        grown = {name: size for name, log in logs.items() if (size := _size(log)) != self._sizes[name]}
        if grown:
            self._written = now
            self._sizes.update(grown)
            line = json.dumps({"time": round(time.time(), 3), "sizes": grown}) + "\n"
            try:
                if self._descriptor is None:
                    self._descriptor = write_own(self._path)
                os.write(self._descriptor, line.encode())
            except OSError:
                # The disk is full or lost, and the logs, too; `slurm-elastic logs` works without the times.
                self._logs = {}
        if to_the_end and self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        return bool(grown)


def _size(log: str) -> int:
    try:
        return os.stat(log).st_size  # noqa: PTH116 (called for each log several times a second)
    except OSError:
        return 0


class Tail:
    """Follows files in one thread from `start` until `stop`, which returns when everything was shown.

    torch's TailLog (torch/distributed/elastic/multiprocessing/tail_log.py, 2.13) has a thread for every file, needs up
    to 0.1 s to stop each of its two streams, which is most of the time of a restart, and puts its prefix into the
    middle of a line that is written in parts. Here a line's beginning is shown without its end, too, as of a bar or a
    prompt; another one that has something to say then begins a line of its own.
    """

    def __init__(self, files: Sequence[FollowedFile | LogTimes]) -> None:
        self._files = files
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="slurm-elastic-tail", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        if self._files:
            self._thread.start()

    def stop(self) -> None:
        """Show the rest of the files, and end the thread."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _follow(self) -> None:
        pause = _SHORTEST_PAUSE
        while not self._stopping.wait(pause):
            busy = [file.show() for file in self._files]
            pause = _SHORTEST_PAUSE if any(busy) else min(2 * pause, _LONGEST_PAUSE)
        for file in self._files:
            file.show(to_the_end=True)
