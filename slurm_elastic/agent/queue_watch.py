"""Watches in a thread until a job has left the queue: a question to Slurm may take seconds."""

from __future__ import annotations

import os
import threading
from types import TracebackType

from slurm_elastic.slurm import Controller


class QueueWatch:
    """Watches one job, in a ``with`` statement.

    Args:
        job: The id of the job, or of the array; None to watch no job.
        controller: Slurm's controller; only the thread uses it.
        interval: Seconds between two questions.

    Attributes:
        fd: Readable when the job is over; for a selector.
    """

    def __init__(self, job: str | None, controller: Controller, interval: float) -> None:
        self.job = job
        self._controller, self._interval = controller, interval
        self._job_ended, self._stopping = threading.Event(), threading.Event()
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # A daemon: the process does not wait for its last question to Slurm.
        self._thread = threading.Thread(target=self._watch, name="slurm-elastic-queue", daemon=True)

    def is_over(self) -> bool:
        """Return True if the job neither waits nor runs; False also while Slurm gives no answer."""
        return self._job_ended.is_set()

    def __enter__(self) -> QueueWatch:
        """Begin to watch."""
        if self.job is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End the watch. The descriptor stays open, as the thread may be about to write to it."""
        self._stopping.set()

    def _watch(self) -> None:
        while self.job is not None and not self._stopping.wait(self._interval):
            if self._controller.is_queued(self.job) is False:
                self._job_ended.set()
                os.eventfd_write(self.fd, 1)
                return
