"""A thread that finds out when a job has left the queue for good: a question to Slurm may take seconds."""

from __future__ import annotations

import os
import threading
from types import TracebackType

from slurm_elastic.slurm import Controller

__all__ = ["QueueWatch"]


class QueueWatch:
    """Watches one job, in a ``with`` statement.

    Args:
        job: its id, of an array that of the array; None for nothing to watch.
        controller: to ask; used by the thread alone.
        interval: seconds between two questions.

    Attributes:
        fd: readable once the job is over, for use in a selector.
    """

    def __init__(self, job: str | None, controller: Controller, interval: float) -> None:
        self.job = job
        self._controller, self._interval = controller, interval
        self._over, self._end = threading.Event(), threading.Event()
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # A daemon: the process does not wait for its last question.
        self._thread = threading.Thread(target=self._watch, name="slurm-elastic-queue", daemon=True)

    def is_over(self) -> bool:
        """Return True if the job neither waits nor runs; False also while Slurm does not say."""
        return self._over.is_set()

    def __enter__(self) -> QueueWatch:
        """Begin to watch."""
        if self.job is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End the watch. The descriptor stays, as the thread may be about to write to it."""
        self._end.set()

    def _watch(self) -> None:
        while self.job is not None and not self._end.wait(self._interval):
            if self._controller.is_queued(self.job) is False:
                self._over.set()
                os.eventfd_write(self.fd, 1)
                return
