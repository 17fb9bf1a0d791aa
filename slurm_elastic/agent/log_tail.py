"""Shows what workers write, line by line, while they write it.

Takes the place of torch's TailLog (torch/distributed/elastic/multiprocessing/tail_log.py, 2.13), which has a thread for
every file, needs up to 0.1 s for each of its two streams to stop, and so makes up most of a restart; and which puts its
prefix into the middle of a line that is written in parts.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TextIO

from slurm_elastic.agent.nonblocking_output import NonblockingStream

__all__ = ["Followed", "Tail"]

_SHORTEST, _LONGEST = 0.02, 1.0
"""Seconds between looks: few while there is something to show, more while there is not."""
_CHUNK = 1 << 16


@dataclass(slots=True)
class Followed:
    """One file to show.

    Attributes:
        path: need not exist yet.
        prefix: put before every line.
        destination: where the lines go.
        wanted: which lines are shown.
    """

    path: str
    prefix: str
    destination: TextIO
    wanted: Callable[[str], bool]
    descriptor: int | None = field(default=None, init=False)
    rest: bytes = field(default=b"", init=False)

    def show(self, *, to_the_end: bool = False) -> bool:
        """Show the lines that are complete, with `to_the_end` also what is left; return True if there was anything."""
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


class Tail:
    """Follows files in one thread from `start` until `stop`, which returns when everything was shown."""

    def __init__(self, files: Sequence[Followed]) -> None:
        self._files = files
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="slurm-elastic-tail", daemon=True)

    def start(self) -> None:
        """Begin to show."""
        if self._files:
            self._thread.start()

    def stop(self) -> None:
        """Show what is left."""
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _follow(self) -> None:
        pause = _SHORTEST
        while not self._over.wait(pause):
            busy = [file.show() for file in self._files]
            pause = _SHORTEST if any(busy) else min(2 * pause, _LONGEST)
        for file in self._files:
            file.show(to_the_end=True)
