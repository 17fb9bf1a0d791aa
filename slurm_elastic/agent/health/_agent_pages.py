"""The pages of one agent: its reporter's state, and what is looked up when somebody asks."""

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
    """What the health port shows.

    Args:
        reporter: of the agent.

    Attributes:
        watchdog: of this node; None while, or if, there is none.
        leadership: where the leader is, and whether that is this agent.
        rejected: how many records of strangers the leader here has dropped.
        progress: how far the workers here are.
    """

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self.watchdog: Watchdog | None = None
        self.leadership: Callable[[], tuple[str, bool]] = lambda: ("", False)
        self.rejected: Callable[[], int] = int
        self.progress: Callable[[], Sequence[WorkerProgress]] = tuple
        self._closing = False

    def last_progress(self) -> int:
        """What torch calls the alive callback: when the agent last showed that it lives, by this machine's clock.

        Both threads that supervise have to: the main loop, which is asked, and the watchdog.
        """
        silence = self._reporter.silence()
        if self.watchdog is not None:
            silence = max(silence, self.watchdog.age())
        return int(time.time() - silence)

    def ready(self) -> tuple[bool, str]:
        """Whether workers train here."""
        snapshot = self._reporter.snapshot
        text = snapshot.stage.value
        if snapshot.place is not None and snapshot.stage in _TRAINS:
            text += f" in round {snapshot.place.round}"
        return snapshot.stage in _TRAINS, text

    def status(self) -> bytes:
        """JSON."""
        snapshot = self._reporter.snapshot
        return status_page(snapshot, self._readings(snapshot))

    def metrics(self) -> tuple[bytes, str]:
        """In Prometheus' format."""
        # prometheus_client takes a tenth of a second to import; most agents are never asked.
        from slurm_elastic.agent.health._metrics import CONTENT_TYPE, metrics_page

        snapshot = self._reporter.snapshot
        return metrics_page(snapshot, self._readings(snapshot)), CONTENT_TYPE

    def stacks(self) -> bytes:
        """What the threads of the workers and of the agent are doing."""
        place = self._reporter.snapshot.place
        workers = {worker.pid: worker.rank for worker in place.workers} if place is not None else {}
        stacks = collect_stacks(sorted(workers), _STACKS_TIMEOUT, lambda: self._closing)
        parts = [
            f"rank {workers[pid]}\n{text}" for pid, text in sorted(stacks.items(), key=lambda one: workers[one[0]])
        ]
        return "\n".join([*parts, _own_stacks()]).encode(errors="replace")

    def close(self) -> None:
        """Let go of whatever still runs."""
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
