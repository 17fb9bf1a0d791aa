"""The reports of agents on what they do now, as the leader has passed them on: docs/events.md has the schema. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from slurm_elastic import typed_json
from slurm_elastic.observe.views import LiveAnswer
from slurm_elastic.rendezvous.transport.messages import StatusAnswer
from slurm_elastic.slow_ranks import Pace

_SCHEMA = 1
"""The newest schema of reports that this release knows."""


@dataclass(frozen=True, slots=True)
class LiveWorker:
    """A worker; None stands for what is unknown.

    Attributes:
        rank, pid: Its rank, and its process on its node.
        state: ``starting``, ``stepping``, ``stopped``, or ``unknown`` if its script does not use the trainer API.
        process: State of its process, a letter as in proc_pid_stat(5).
        steps: Calls of should_stop in this round.
        step, checkpoint: The newest step and checkpoint that the script has reported in this round.
        step_seconds: Seconds since the last call of should_stop.
        steps_per_second: In this round so far.
        loss, loss_step: The loss that the script has reported last, and its step; one that is not finite is text.
        pace_seconds, busy_seconds, loading_seconds, waiting_seconds, best_busy_seconds, paces: Its pace, see
            :class:`slurm_elastic.slow_ranks.Pace`.
    """

    rank: int
    pid: int | None = None
    state: str = "unknown"
    process: str = ""
    steps: int = 0
    step: int | None = None
    checkpoint: int | None = None
    step_seconds: float | None = None
    steps_per_second: float | None = None
    loss: float | Literal["nan", "inf", "-inf"] | None = None
    loss_step: int | None = None
    pace_seconds: float | None = None
    busy_seconds: float | None = None
    loading_seconds: float | None = None
    waiting_seconds: float | None = None
    best_busy_seconds: float | None = None
    paces: int = 0

    @property
    def pace(self) -> Pace | None:
        """Its pace; None if it is unknown."""
        if self.pace_seconds is None or self.busy_seconds is None or self.best_busy_seconds is None:
            return None
        loading, waiting = self.loading_seconds or 0.0, self.waiting_seconds or 0.0
        return Pace(self.pace_seconds, self.busy_seconds, loading, waiting, self.best_busy_seconds, self.paces)


@dataclass(frozen=True, slots=True)
class LiveLeave:
    """A departure that an agent has announced; `seconds` until it has to be gone, None if that is unknown."""

    reason: str
    text: str = ""
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class LiveAgent:
    """The report of an agent.

    Attributes:
        schema: Of the report.
        version: Release of the agent.
        state: Stage of the agent, as on its health port.
        seconds: Since it is in this state.
        round: Its round, or its last one; None before the first.
        leave: The departure that it has announced; None for none.
        hangs: Workers that its watchdog has found hanging.
        snapshot_bytes: Memory that it holds for snapshots.
        safe_step: The newest step of which other nodes have copies; None if there is none.
        workers: Its workers.
        workers_left_out: Workers for which its report had no room.
    """

    state: str
    schema: int = 1
    version: str = ""
    seconds: float = 0.0
    round: int | None = None
    leave: LiveLeave | None = None
    hangs: int = 0
    snapshot_bytes: int = 0
    safe_step: int | None = None
    workers: tuple[LiveWorker, ...] = ()
    workers_left_out: int = 0


@dataclass(frozen=True, slots=True)
class LiveRun:
    """The answer of a leader with the reports of its agents.

    Attributes:
        leader: The leader's own part.
        agents: The reports by the identities of agents.
        problems: A line for each kind of report that cannot be read.
    """

    leader: LiveAnswer
    agents: Mapping[str, LiveAgent] = field(default_factory=dict)
    problems: tuple[str, ...] = ()

    @property
    def round(self) -> int:
        """The newest round of an agent; -1 before the first."""
        return max((agent.round for agent in self.agents.values() if agent.round is not None), default=-1)


def live_run(answer: StatusAnswer, reports: Mapping[str, str], seconds: float) -> LiveRun:
    """Read what the leader and the agents have said.

    Args:
        answer: Of the leader.
        reports: JSON by the identities of agents.
        seconds: That the answer took.
    """
    agents: dict[str, LiveAgent] = {}
    problems = []
    for name, text in reports.items():
        try:
            agents[name] = typed_json.decode(text, LiveAgent)
        except typed_json.JSONError as error:
            problems.append(f"the report of {name} cannot be read: {error}")
    if any(agent.schema > _SCHEMA for agent in agents.values()):
        problems.append("some agents are of a newer release: what is new in their reports is not shown")
    leader = LiveAnswer(
        leader=answer.leader,
        phase=answer.phase,
        phase_seconds=answer.seconds,
        min_nodes=answer.min_nodes,
        max_nodes=answer.max_nodes,
        asked=answer.asked,
        answered=answer.answered,
        silent=answer.silent,
        seconds=round(seconds, 3),
    )
    return LiveRun(leader, agents, tuple(problems))
