"""The state of an agent, as one immutable value that `Reporter` replaces at every change."""

from __future__ import annotations

import contextlib
import enum
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from slurm_elastic.slow_ranks import Pace, SlowRank

if TYPE_CHECKING:
    from slurm_elastic.control.agent_side import WorkerProgress
    from slurm_elastic.rendezvous.transport.messages import Assignment


class Stage(enum.Enum):
    """The stages of an agent."""

    STARTING = "starting"
    """The agent looks for the leader, or has found it and sent nothing yet."""
    JOINING = "joining"
    """It waits for the next round, or starts the workers of a round."""
    SPARE = "spare"
    """It waits as a spare."""
    TRAINING = "training"
    """Its workers run."""
    DONE = "done"
    """Its workers succeeded; workers of other nodes may still run."""
    FAILED = "failed"
    """A worker failed; the agent waits for the leader's decision."""
    STOPPING = "stopping"
    """The round is over; the agent stops its workers."""
    LEAVING = "leaving"
    """The agent leaves, or the run is over; it stops its workers."""


_LOST = frozenset({Stage.STARTING, Stage.JOINING, Stage.FAILED, Stage.STOPPING})


@dataclass(frozen=True, slots=True)
class RoundInfo:
    """This node's part in a round: its assignment, and the process ids of its workers by local rank."""

    assignment: Assignment
    pids: Mapping[int, int]

    @property
    def workers(self) -> list[tuple[int, int, int]]:
        """Rank, local rank and process id of each worker here."""
        base = self.assignment.place.base_rank
        return [(base + local, local, pid) for local, pid in sorted(self.pids.items())]


@dataclass(frozen=True, slots=True)
class Leave:
    """An announced departure of this agent.

    Attributes:
        by: Monotonic time at which the agent has to be gone.
    """

    reason: str
    detail: str
    by: float


@dataclass(frozen=True, slots=True)
class AgentState:
    """The state of an agent, without the facts that are read for each request.

    Attributes:
        since: Monotonic time at which the stage began.
        round_info: This node's part in the present round, or in its last one; None before the first.
        rounds: The reason of each round that contained this node.
        changes: Seconds of each round change.
        changing_since: Monotonic time at which the present change began; None while workers train.
        training, lost: Seconds up to `since` in which workers ran, and in which workers should have run and did not.
    """

    run: str
    node: str
    job: str
    agent: str
    since: float
    max_restarts: int = 0
    stage: Stage = Stage.STARTING
    round_info: RoundInfo | None = None
    notices: tuple[str, ...] = ()
    leave: Leave | None = None
    rounds: tuple[str, ...] = ()
    changes: tuple[float, ...] = ()
    changing_since: float | None = None
    training: float = 0.0
    lost: float = 0.0
    hangs: int = 0
    kills: int = 0

    @property
    def restarts(self) -> int:
        """Restarts charged to the run so far."""
        return 0 if self.round_info is None else self.round_info.assignment.restarts


@dataclass(frozen=True, slots=True)
class Readings:
    """Facts that are read for each request.

    Attributes:
        cpu_seconds, resident_bytes: CPU time and resident memory of the agent's own process.
        watchdog_age: Seconds since the last activity of the watchdog; None without a watchdog.
        rejected: Records without the run's secret that the leader dropped; 0 on other agents.
        snapshot_bytes: Memory that the agent holds for snapshots.
        safe_step: Step of the newest snapshot of which other nodes have copies; None if there is none.
        steps: Those of the workers here in all rounds together.
        slow: Ranks of the run that stay slow; only the agent of rank 0 knows them.
    """

    now: float
    cpu_seconds: float = 0.0
    resident_bytes: int = 0
    leader: str = ""
    leads: bool = False
    watchdog_age: float | None = None
    ignored: int = 0
    rejected: int = 0
    snapshot_bytes: int = 0
    safe_step: int | None = None
    progress: Sequence[WorkerProgress] = ()
    steps: int = 0
    paces: Mapping[int, Pace] = field(default_factory=dict)
    slow: tuple[SlowRank, ...] = ()


def enter(state: AgentState, stage: Stage, now: float) -> AgentState:
    """Return the state in another stage, with the times of the stage that ends; an agent that joins has no workers."""
    training, lost = state.training, lost_seconds(state, now)
    if state.stage is Stage.TRAINING:
        training += now - state.since
    changed = replace(state, stage=stage, since=now, training=training, lost=lost)
    if stage is Stage.JOINING and state.round_info is not None:
        changed = replace(changed, round_info=replace(state.round_info, pids={}))
    if stage is Stage.TRAINING:
        return _change_over(changed, now)
    if stage in _LOST and state.changing_since is None:
        return replace(changed, changing_since=now)
    return changed


def lost_seconds(state: AgentState, now: float) -> float:
    """Return the seconds up to now in which workers should have run here and did not."""
    return state.lost + (now - state.since if state.stage in _LOST else 0.0)


def _change_over(state: AgentState, now: float) -> AgentState:
    reasons = (state.round_info.assignment.reason.value,) if state.round_info is not None else ()
    seconds = (now - state.changing_since,) if state.changing_since is not None else ()
    return replace(state, rounds=(*state.rounds, *reasons), changes=(*state.changes, *seconds), changing_since=None)


_FRESH = 1.0
"""Seconds for which an activity of the main loop counts as recent."""


class Reporter:
    """The agent's present state, and a probe of its main loop.

    The main loop sleeps until an event comes, so its silence means nothing. For a request of liveness the reporter
    wakes it by `fd`, if its last activity is old; the time without an answer is its silence.

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
