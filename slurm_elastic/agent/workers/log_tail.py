"""Copies the workers' output to the console, and records at which time the logs had which size.

This replaces torch's TailLog (torch/distributed/elastic/multiprocessing/tail_log.py, 2.13). That has a thread for every
file, and needs up to 0.1 s to stop each of its two streams, which is most of the time of a restart. And it puts its
prefix into the middle of a line that is written in parts. Here a line's beginning is shown without its end, too, as of
a bar or a prompt; another one that has something to say then begins a line of its own.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from slurm_elastic.agent.workers.nonblocking_output import NonblockingStream
from slurm_elastic.ownership import write_own

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
    """Holds back the last words of a worker, until it is known whether another one has made it fail.

    Args:
        ended: Returns True if the worker has ended.
        now: Returns the monotonic time in seconds.
    """

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
        path: The path of the file, which need not exist yet.
        prefix: The text before every line.
        destination: The stream that the lines are written to.
        wanted: Returns True for a line to show.
        last_words: What holds back the last words of the worker; None if they are shown as they come.
    """

    path: str
    prefix: str
    destination: TextIO
    wanted: Callable[[str], bool]
    last_words: LastWords | None = None
    descriptor: int | None = field(default=None, init=False)
    _rest: str = field(default="", init=False)
    _last: str = field(default="\n", init=False)
    _filters: bool = field(init=False)
    _decoder: codecs.IncrementalDecoder = field(init=False)

    def __post_init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        # torch's filters want a line that contains some text: one that wants the empty line wants all.
        self._filters = not self.wanted("")

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
        if self._filters:
            *lines, self._rest = (self._rest + text).split("\n")
            if self._rest and (end or len(self._rest) > _CHUNK):
                lines, self._rest = [*lines, self._rest], ""
            text = "".join(line + "\n" for line in lines if self.wanted(line + "\n"))
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
    """End the unfinished line of a worker, if the stream has one, before another line is written there.

    Args:
        stream: The stream of the other line.
        of: End it only if it is a line of this file.
    """
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
        path: The path of the file, in the directory of the first rank of this node.
        logs: The logs of all ranks of this node; they need not exist yet.
        pause: The shortest time in seconds between two lines.
    """

    def __init__(self, path: str, logs: Sequence[str], pause: float = _TIMES_PAUSE) -> None:
        self._path, self._pause = path, pause
        self._logs = {f"{Path(log).parent.name}/{Path(log).name}": log for log in logs}
        self._sizes = dict.fromkeys(self._logs, 0)
        self._written = float("-inf")
        self._descriptor: int | None = None
        self._failed = False

    def note(self, *, at_once: bool = False) -> bool:
        """Write a line if logs have grown since the last one, at least `pause` seconds ago; return True if so.

        Args:
            at_once: True to write it at any time.
        """
        now = time.monotonic()
        if self._failed or (now - self._written < self._pause and not at_once):
            return False
        grown = {name: size for name, log in self._logs.items() if (size := _size(log)) != self._sizes[name]}
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
                self._failed = True
        return bool(grown)

    def close(self) -> None:
        """Write the last line, and close the file."""
        self.note(at_once=True)
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _size(log: str) -> int:
    try:
        return os.stat(log).st_size  # noqa: PTH116 (called for each log several times a second)
    except OSError:
        return 0


class Tail:
    """Follows files in one thread from `start` until `stop`, which returns when everything was shown.

    Args:
        files: The files to show.
        times: Records the sizes of the round's logs; None for no record.
    """

    def __init__(self, files: Sequence[FollowedFile], times: LogTimes | None = None) -> None:
        self._files, self._times = files, times
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="slurm-elastic-tail", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        if self._files or self._times is not None:
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
            if self._times is not None:
                busy.append(self._times.note())
            pause = _SHORTEST_PAUSE if any(busy) else min(2 * pause, _LONGEST_PAUSE)
        for file in self._files:
            file.show(to_the_end=True)
        if self._times is not None:
            self._times.close()
