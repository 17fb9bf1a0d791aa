"""Copies the workers' output to the console line by line, and records at which time the logs had which size.

This replaces torch's TailLog (torch/distributed/elastic/multiprocessing/tail_log.py, 2.13). That has a thread for every
file, and needs up to 0.1 s to stop each of its two streams, which is most of the time of a restart. And it puts its
prefix into the middle of a line that is written in parts.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from slurm_elastic.agent.nonblocking_output import NonblockingStream
from slurm_elastic.ownership import write_own

__all__ = ["FollowedFile", "LogTimes", "Tail"]

_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.02, 1.0
"""Seconds between two reads of the files: short while they grow, longer while they do not."""
_CHUNK = 1 << 16
_TIMES_PAUSE = 0.25
"""Seconds between two lines of the file of times, while the logs grow."""


@dataclass(slots=True)
class FollowedFile:
    """One file to show.

    Attributes:
        path: The path of the file, which need not exist yet.
        prefix: The text before every line.
        destination: The stream that the lines are written to.
        wanted: Returns True for a line to show.
    """

    path: str
    prefix: str
    destination: TextIO
    wanted: Callable[[str], bool]
    descriptor: int | None = field(default=None, init=False)
    rest: bytes = field(default=b"", init=False)

    def show(self, *, to_the_end: bool = False) -> bool:
        """Show the complete lines, and with `to_the_end` an incomplete last one; return True if the file has grown."""
        if self.descriptor is None:
            with contextlib.suppress(FileNotFoundError):
                self.descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        found = False
        while self.descriptor is not None and (data := os.read(self.descriptor, _CHUNK)):
            found = True
            *lines, self.rest = (self.rest + data).split(b"\n")
            self._write(lines)
        if to_the_end:
            self._write([self.rest] if self.rest else [])
            if self.descriptor is not None:
                os.close(self.descriptor)
                self.descriptor = None
        return found

    def _write(self, lines: Sequence[bytes]) -> None:
        texts = (line.decode(errors="replace") + "\n" for line in lines)
        shown = "".join(self.prefix + text for text in texts if self.wanted(text))
        if shown:
            if isinstance(self.destination, NonblockingStream):
                self.destination.wait_for_room()
            self.destination.write(shown)
            self.destination.flush()


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
