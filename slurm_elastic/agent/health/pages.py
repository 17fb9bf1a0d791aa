"""The pages of an agent: the state that its main loop reports, readings of the moment, and both as JSON."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from slurm_elastic._version import __version__
from slurm_elastic.agent.event_log import json_number
from slurm_elastic.agent.health.state import AgentState, Readings, RoundInfo, Stage, lost_seconds
from slurm_elastic.agent.watchdog import collect_stacks
from slurm_elastic.slow_ranks import Pace, scores

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
        from slurm_elastic.agent.health.metrics import CONTENT_TYPE, metrics_page

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


def status_page(state: AgentState, readings: Readings) -> bytes:
    """Return the page; times in seconds."""
    round_info = state.round_info
    content: dict[str, Any] = {
        "run": state.run,
        "node": state.node,
        "job": state.job,
        "agent": state.agent,
        "version": __version__,
        "state": state.stage.value,
        "state_seconds": _rounded(readings.now - state.since),
        "leader": readings.leader,
        "leads": readings.leads,
        "round": None if round_info is None else _round(round_info),
        "workers": [] if round_info is None else _workers(round_info, readings),
        "slow_ranks": [
            {"rank": slow_rank.rank, "relative_score": _rounded(slow_rank.score.relative), **_pace(slow_rank.pace)}
            for slow_rank in readings.slow
        ],
        "restarts": state.restarts,
        "restarts_left": max(0, state.max_restarts - state.restarts),
        "notices": list(state.notices),
        "lost_seconds": _rounded(lost_seconds(state, readings.now)),
        "watchdog": None
        if readings.watchdog_age is None
        else {"age_seconds": _rounded(readings.watchdog_age), "hangs": state.hangs, "kills": state.kills},
    }
    return json.dumps(content, indent=1).encode() + b"\n"


def _round(round_info: RoundInfo) -> dict[str, Any]:
    return {
        "number": round_info.round,
        "reason": round_info.reason,
        "members": round_info.nodes,
        "nodes": round_info.members,
        "node_rank": round_info.node_rank,
        "world_size": round_info.world_size,
        "ranks": [worker.rank for worker in round_info.workers],
    }


def _workers(round_info: RoundInfo, readings: Readings) -> list[dict[str, Any]]:
    by_local_rank = {progress.local_rank: progress for progress in readings.progress}
    return [
        {
            "rank": worker.rank,
            "local_rank": worker.local_rank,
            "pid": worker.pid,
            "step": progress.step if progress else None,
            "step_age_seconds": _rounded(progress.seconds_since_boundary if progress else None),
            "loss": json_number(progress.loss if progress else None),
            **_pace(readings.paces.get(worker.local_rank)),
        }
        for worker in round_info.workers
        for progress in [by_local_rank.get(worker.local_rank)]
    ]


def _pace(pace: Pace | None) -> dict[str, float | None]:
    if pace is None:
        return dict.fromkeys(("pace_seconds", "busy_seconds", "loading_seconds", "waiting_seconds", "individual_score"))
    return {
        "pace_seconds": _precise(pace.step),
        "busy_seconds": _precise(pace.busy),
        "loading_seconds": _precise(pace.loading),
        "waiting_seconds": _precise(pace.waiting),
        "individual_score": _rounded(scores({0: pace})[0].individual),
    }


def _precise(seconds: float) -> float:
    return round(seconds, 6)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)


_FRESH = 1.0
"""Seconds for which an activity of the main loop counts as recent."""


class Reporter:
    """The agent's present state, and a probe of its main loop.

    The main loop sleeps until an event comes, so its silence means nothing. For a request of liveness the reporter
    wakes it by `fd`, if its last activity is old; the time without an answer is its silence.

    Args:
        state: The first state.

    Attributes:
        fd: Readable when the main loop has to answer; for a selector.
    """

    def __init__(self, state: AgentState) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.Lock()
        self._state = state
        self._answered_at = time.monotonic()
        self._asked_at: float | None = None
        self._quiet = False

    @property
    def state(self) -> AgentState:
        """The present state; a value that does not change."""
        return self._state

    # Called by the main loop.

    def answer(self) -> None:
        """Note that the main loop is active; cheap unless it was probed."""
        if self._asked_at is not None:
            with self._lock, contextlib.suppress(BlockingIOError):
                os.eventfd_read(self.fd)
                self._asked_at = None
        self._answered_at = time.monotonic()

    def change(self, change: Callable[[AgentState], AgentState]) -> None:
        """Replace the state by what a function makes of it. Any thread may call this."""
        with self._lock:
            self._state = change(self._state)

    def hung(self, killed: bool) -> None:
        """Count a worker that the watchdog found hanging. Any thread may call this."""
        self.change(lambda state: replace(state, hangs=state.hangs + 1, kills=state.kills + int(killed)))

    def over(self) -> None:
        """Note that the main loop has ended as intended; from now on it counts as alive."""
        with self._lock:
            self._quiet = True
            self._asked_at = None

    def close(self) -> None:
        """Close the descriptor, after the last request."""
        self.over()
        with self._lock:
            os.close(self.fd)

    # Called by the server.

    def silence(self) -> float:
        """Probe the main loop if its last activity is old, and return for how many seconds it has not answered."""
        with self._lock:
            now = time.monotonic()
            if self._quiet:
                return 0.0
            if self._asked_at is None and now - self._answered_at > _FRESH:
                self._asked_at = now
                os.eventfd_write(self.fd, 1)
            return 0.0 if self._asked_at is None else now - self._asked_at
