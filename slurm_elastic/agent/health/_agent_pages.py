"""The pages of an agent: its reporter's state, and readings that are taken for each request."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from slurm_elastic.agent.health._state import AgentState, Readings, Stage
from slurm_elastic.agent.health._status_page import status_page
from slurm_elastic.agent.health._status_reporter import Reporter
from slurm_elastic.agent.watchdog import collect_stacks

_STACKS_TIMEOUT = 5.0
_TRAINS = (Stage.TRAINING, Stage.DONE)


class NodePages:
    """The pages of the health port.

    Args:
        reporter: The agent's reporter.

    Attributes:
        sources: The functions that add what they know to readings; called in this order, from any thread.
    """

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self.sources: Sequence[Callable[[Readings], Readings]] = ()
        self._closing = False

    def last_progress(self) -> int:
        """Return the time of the agent's last activity, by this machine's clock; torch's alive callback.

        The main loop and the watchdog both have to be active.
        """
        return int(time.time() - max(self._reporter.silence(), self.readings().watchdog_age or 0.0))

    def ready(self) -> tuple[bool, str]:
        """Return whether workers train on this node, and the state as text."""
        state = self._reporter.state
        text = state.stage.value
        if state.round_info is not None and state.stage in _TRAINS:
            text += f" in round {state.round_info.round}"
        return state.stage in _TRAINS, text

    def status(self) -> bytes:
        """Return the status as JSON."""
        return status_page(*self._contents())

    def metrics(self) -> tuple[bytes, str]:
        """Return the metrics in Prometheus' format, and their content type."""
        # The import of prometheus_client takes a tenth of a second, and most agents never serve this page.
        from slurm_elastic.agent.health._metrics import CONTENT_TYPE, metrics_page

        return metrics_page(*self._contents()), CONTENT_TYPE

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

    def readings(self) -> Readings:
        """Return the facts of now; from any thread."""
        times = os.times()
        readings = Readings(time.monotonic(), times.user + times.system, _resident())
        for source in self.sources:
            readings = source(readings)
        return readings

    def _contents(self) -> tuple[AgentState, Readings]:
        state, readings = self._reporter.state, self.readings()
        # The steps of a round that is over are part of the state.
        return state, replace(readings, progress=()) if state.counted else readings


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
