"""The pages of an agent: its reporter's snapshot, and readings that are taken for each request."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from slurm_elastic.agent.health._state import Readings, Snapshot, Stage
from slurm_elastic.agent.health._status_page import status_page
from slurm_elastic.agent.health._status_reporter import Reporter
from slurm_elastic.agent.watchdog import Watchdog, collect_stacks
from slurm_elastic.control import WorkerProgress

__all__ = ["NodePages"]

_STACKS_TIMEOUT = 5.0
_TRAINS = (Stage.TRAINING, Stage.DONE)


class NodePages:
    """The pages of the health port.

    Args:
        reporter: The agent's reporter.

    Attributes:
        watchdog: The watchdog of this node; None for none.
        leadership: Returns the leader's node, and True if this agent is the leader.
        rejected: Returns the number of records without the run's secret that the leader here has dropped.
        progress: Returns the progress of the workers here.
    """

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self.watchdog: Watchdog | None = None
        self.leadership: Callable[[], tuple[str, bool]] = lambda: ("", False)
        self.rejected: Callable[[], int] = int
        self.progress: Callable[[], Sequence[WorkerProgress]] = tuple
        self._closing = False

    def last_progress(self) -> int:
        """Return the time of the agent's last activity, by this machine's clock; torch's alive callback.

        The main loop and the watchdog both have to be active.
        """
        silence = self._reporter.silence()
        if self.watchdog is not None:
            silence = max(silence, self.watchdog.age())
        return int(time.time() - silence)

    def ready(self) -> tuple[bool, str]:
        """Return whether workers train on this node, and the state as text."""
        snapshot = self._reporter.snapshot
        text = snapshot.stage.value
        if snapshot.place is not None and snapshot.stage in _TRAINS:
            text += f" in round {snapshot.place.round}"
        return snapshot.stage in _TRAINS, text

    def status(self) -> bytes:
        """Return the status as JSON."""
        snapshot = self._reporter.snapshot
        return status_page(snapshot, self._readings(snapshot))

    def metrics(self) -> tuple[bytes, str]:
        """Return the metrics in Prometheus' format, and their content type."""
        # The import of prometheus_client takes a tenth of a second, and most agents never serve this page.
        from slurm_elastic.agent.health._metrics import CONTENT_TYPE, metrics_page

        snapshot = self._reporter.snapshot
        return metrics_page(snapshot, self._readings(snapshot)), CONTENT_TYPE

    def stacks(self) -> bytes:
        """Return the stacks of all threads of the workers and of the agent."""
        place = self._reporter.snapshot.place
        workers = {worker.pid: worker.rank for worker in place.workers} if place is not None else {}
        stacks = collect_stacks(sorted(workers), _STACKS_TIMEOUT, lambda: self._closing)
        parts = [
            f"rank {workers[pid]}\n{text}" for pid, text in sorted(stacks.items(), key=lambda one: workers[one[0]])
        ]
        return "\n".join([*parts, _own_stacks()]).encode(errors="replace")

    def close(self) -> None:
        """Stop collecting stacks."""
        self._closing = True

    def _readings(self, snapshot: Snapshot) -> Readings:
        watchdog = self.watchdog
        times = os.times()
        leader, leads = self.leadership()
        progress = () if snapshot.counted else self.progress()
        return Readings(
            now=time.monotonic(),
            cpu_seconds=times.user + times.system,
            resident_bytes=_resident(),
            leader=leader,
            leads=leads,
            watchdog_age=None if watchdog is None else watchdog.age(),
            ignored=0 if watchdog is None else watchdog.dropped,
            rejected=self.rejected(),
            steps=tuple((one.local_rank, one.step) for one in progress if one.step is not None),
            step_ages=tuple(
                (one.local_rank, one.seconds_since_boundary)
                for one in progress
                if one.seconds_since_boundary is not None
            ),
            losses=tuple((one.local_rank, one.loss) for one in progress if one.loss is not None),
            steps_here=sum(one.boundary for one in progress),
        )


def _resident() -> int:
    # proc_pid_statm(5): size resident ..., in pages
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def _own_stacks() -> str:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = [f"agent, process {os.getpid()}"]
    for ident, frame in sys._current_frames().items():
        parts.append(f"thread {names.get(ident, ident)}\n{''.join(traceback.format_stack(frame))}")
    return "\n".join(parts)
