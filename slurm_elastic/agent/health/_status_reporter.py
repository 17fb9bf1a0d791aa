"""The reporter between the agent's main loop, which reports its state, and the health port's thread, which reads it."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from slurm_elastic.agent.health._state import AgentState, Leave, RoundInfo, Stage, enter

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

    def enter(self, stage: Stage) -> None:
        """Enter a stage."""
        self._change(lambda state: enter(state, stage, time.monotonic()))

    def join(self) -> None:
        """Enter the stage of joining, without workers."""
        now = time.monotonic()
        self._change(lambda state: enter(_without_workers(state), Stage.JOINING, now))

    def train(self, round_info: RoundInfo, restarts: int) -> None:
        """Enter the stage of training in a round."""
        now = time.monotonic()
        self._change(
            lambda state: enter(
                replace(state, round_info=round_info, restarts=restarts, counted=False), Stage.TRAINING, now
            )
        )

    def count(self, steps: int) -> None:
        """Add the steps of this node's workers in a round that is over."""
        self._change(lambda state: state if state.counted else replace(state, steps=state.steps + steps, counted=True))

    def notice(self, reason: str, detail: str = "", seconds: float | None = None) -> None:
        """Add a notice: why this agent leaves, the same for people, and the seconds until it has to be gone."""
        leave = Leave(reason, detail, None if seconds is None else time.monotonic() + seconds)
        self._change(lambda state: replace(state, notices=(*state.notices, reason), leave=leave))

    def hung(self, killed: bool) -> None:
        """Count a worker that the watchdog found hanging. Any thread may call this."""
        self._change(lambda state: replace(state, hangs=state.hangs + 1, kills=state.kills + int(killed)))

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

    def _change(self, change: Callable[[AgentState], AgentState]) -> None:
        with self._lock:
            self._state = change(self._state)


def _without_workers(state: AgentState) -> AgentState:
    round_info = state.round_info
    return state if round_info is None else replace(state, round_info=replace(round_info, workers=()))
