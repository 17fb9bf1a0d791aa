"""Writes lines to a file of the run in a thread: a shared file system may be slow, and the agent must not wait."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from slurm_elastic.rundir import RunDirError

logger = logging.getLogger("slurm_elastic")

Due = Callable[[], "float | None"]
Idle = Callable[[], "str | None"]


class LineWriter:
    """The lines of one file, kept until `start`; `what`, such as "events are", begins the warning that it fails."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._thread: threading.Thread | None = None
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self.put: Callable[[str], None] = self._lines.put

    def start(self, append: Callable[[str], None], due: Due = lambda: None, idle: Idle = lambda: None) -> None:
        """Start to write; `idle`, which may return a line, is called after `due()` seconds without one."""
        name = f"slurm-elastic-{self._what.split()[0]}"
        self._thread = threading.Thread(target=self._write, args=(append, due, idle), name=name, daemon=True)
        self._thread.start()

    def close(self, timeout: float) -> None:
        """Write out the remaining lines, for at most `timeout` seconds, and end the thread."""
        self._lines.put(None)
        if self._thread is not None:
            self._thread.join(timeout)

    def _write(self, append: Callable[[str], None], due: Due, idle: Idle) -> None:
        has_warned = False
        while True:
            try:
                line = self._lines.get(timeout=due())
            except queue.Empty:
                if (line := idle()) is None:
                    continue
            if line is None:
                return
            try:
                append(line)
            except RunDirError as error:
                if not has_warned:
                    logger.warning("%s not written: %s", self._what, error)
                has_warned = True
