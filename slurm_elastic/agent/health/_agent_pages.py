"""The pages of an agent: its reporter's state, and readings that are taken for each request."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from slurm_elastic.agent.health._state import AgentState, Readings, Stage
from slurm_elastic.agent.health._status_page import status_page
from slurm_elastic.agent.health._status_reporter import Reporter
from slurm_elastic.agent.watchdog import Watchdog, collect_stacks
from slurm_elastic.control import WorkerProgress
from slurm_elastic.slow_ranks import Pace, SlowRank

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
        paces: Returns their paces by local rank.
        slow: Returns the ranks of the run that stay slow.
        snapshots: Returns the bytes that the agent holds for snapshots, and the step of the newest one of which other
            nodes have copies; None if there is none.
    """

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self.watchdog: Watchdog | None = None
        self.leadership: Callable[[], tuple[str, bool]] = lambda: ("", False)
        self.rejected: Callable[[], int] = int
        self.progress: Callable[[], Sequence[WorkerProgress]] = tuple
        self.paces: Callable[[], Mapping[int, Pace]] = dict
        self.slow: Callable[[], Sequence[SlowRank]] = tuple
        self.snapshots: Callable[[], tuple[int, int | None]] = lambda: (0, None)
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
        state = self._reporter.state
        text = state.stage.value
        if state.round_info is not None and state.stage in _TRAINS:
            text += f" in round {state.round_info.round}"
        return state.stage in _TRAINS, text

    def status(self) -> bytes:
        """Return the status as JSON."""
        state = self._reporter.state
        return status_page(state, self._readings(state))

    def metrics(self) -> tuple[bytes, str]:
        """Return the metrics in Prometheus' format, and their content type."""
        # The import of prometheus_client takes a tenth of a second, and most agents never serve this page.
        from slurm_elastic.agent.health._metrics import CONTENT_TYPE, metrics_page

        state = self._reporter.state
        return metrics_page(state, self._readings(state)), CONTENT_TYPE

    def stacks(self) -> bytes:
        """Return the stacks of all threads of the workers and of the agent."""
        round_info = self._reporter.state.round_info
        workers = {worker.pid: worker.rank for worker in round_info.workers} if round_info is not None else {}
        stacks = collect_stacks(sorted(workers), _STACKS_TIMEOUT, lambda: self._closing)
        parts = [
            f"rank {workers[pid]}\n{text}" for pid, text in sorted(stacks.items(), key=lambda stack: workers[stack[0]])
        ]
        return "\n".join([*parts, _own_stacks()]).encode(errors="replace")

    def close(self) -> None:
        """Stop collecting stacks."""
        self._closing = True

    def _readings(self, state: AgentState) -> Readings:
        watchdog = self.watchdog
        times = os.times()
        leader, leads = self.leadership()
        progress = () if state.counted else self.progress()
        snapshot_bytes, safe_step = self.snapshots()
        return Readings(
            now=time.monotonic(),
            cpu_seconds=times.user + times.system,
            resident_bytes=_resident(),
            leader=leader,
            leads=leads,
            watchdog_age=None if watchdog is None else watchdog.age(),
            ignored=0 if watchdog is None else watchdog.dropped,
            rejected=self.rejected(),
            snapshot_bytes=snapshot_bytes,
            safe_step=safe_step,
            steps=tuple((worker.local_rank, worker.step) for worker in progress if worker.step is not None),
            step_ages=tuple(
                (worker.local_rank, worker.seconds_since_boundary)
                for worker in progress
                if worker.seconds_since_boundary is not None
            ),
            losses=tuple((worker.local_rank, worker.loss) for worker in progress if worker.loss is not None),
            steps_here=sum(worker.boundary for worker in progress),
            paces=tuple(self.paces().items()),
            slow=tuple(self.slow()),
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
