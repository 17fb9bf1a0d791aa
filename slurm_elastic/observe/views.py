"""The status of a run as data, and the reports of agents on what they do now, as the leader has passed them on. Pure.

docs/events.md has the schema of both. Times are seconds since 1970.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from slurm_elastic import typed_json
from slurm_elastic.failures.history import Loop
from slurm_elastic.observe.records import Event

if TYPE_CHECKING:
    # It imports msgspec.
    from slurm_elastic.rendezvous.transport.messages import StatusAnswer

_SCHEMA = 1
"""The newest schema of reports that this release knows."""

TRAINS = frozenset({"training", "done"})
"""States of agents whose workers run, or have ended well while others still run."""
WAITS = frozenset({"PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "CONFIGURING"})
RUNS = frozenset({"RUNNING", "COMPLETING", "SUSPENDED", "RESIZING", "SIGNALING", "STOPPED", "STAGE_OUT"})


class RunState(enum.Enum):
    """The states of a run."""

    RUNNING = "running"
    """Workers train."""
    WAITING = "waiting"
    """No workers train, and the run will go on: its agents wait for nodes, or its job waits in the queue."""
    FINISHED = "finished"
    """The run is done."""
    FAILED = "failed"
    """The workers failed for good, or the run was given up."""
    STOPPED = "stopped"
    """No agent runs and no job waits: the run was drained, cancelled or killed, and can be submitted again."""

    @property
    def exit_code(self) -> int:
        """That of ``slurm-elastic status``; 2 is wrong usage, as for every command."""
        return {"finished": 0, "failed": 1, "running": 3, "waiting": 4, "stopped": 5}[self.value]


GOES_ON = frozenset({RunState.RUNNING, RunState.WAITING})


@dataclass(frozen=True, slots=True)
class SlowRankView:
    """A rank that stays slow, or was slow in a round; `until` is None if it was so until the round ended, or is now."""

    rank: int
    node: str
    since: float
    until: float | None
    relative_score: float | None
    text: str


@dataclass(frozen=True, slots=True)
class RankScore:
    """The scores of a rank now, see :class:`slurm_elastic.slow_ranks.Score`; seconds are per step."""

    rank: int
    node: str
    relative_score: float | None
    individual_score: float
    busy_seconds: float
    loading_seconds: float
    waiting_seconds: float


@dataclass(frozen=True, slots=True)
class LiveWorker:
    """A worker in the report of its agent; None stands for what is unknown."""

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


@dataclass(frozen=True, slots=True)
class LiveLeave:
    """A departure that an agent has announced; `seconds` is None if the time until then is unknown."""

    reason: str
    text: str = ""
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class LiveAgent:
    """The report of an agent, which has been in its state for `seconds`; docs/events.md describes the fields."""

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
class AgentView:
    """An agent that has taken part in the run, the newest of its node and job.

    Attributes:
        state: ``joining``, ``spare``, ``training``, ``lost`` or ``ended``; of an agent that has answered, the stage as
            on its health port.
        round: The last round in which its workers ran; None if it had none.
        exit_code: None before its end, or if it was killed.
        domain: Its failure domain; empty if none is known.
        live: What it has answered just now; None if it was not asked, or did not answer.
    """

    node: str
    job: str
    agent: str
    state: str
    since: float
    round: int | None = None
    rank: int | None = None
    workers: int = 0
    exit_code: int | None = None
    domain: str = ""
    live: LiveAgent | None = None

    @property
    def alive(self) -> bool:
        """True unless the agent is known to have ended."""
        return self.state not in ("lost", "ended")

    @property
    def ranks(self) -> range:
        """The ranks of its workers in that round; empty if they are not known."""
        return range(0) if self.rank is None else range(self.rank, self.rank + self.workers)

    @property
    def answers(self) -> tuple[LiveWorker, ...]:
        """Its workers as it has answered; empty if it has not."""
        return () if self.live is None else self.live.workers


@dataclass(frozen=True, slots=True)
class NoticeView:
    """A notice whose job has not ended yet, with the seconds left now; one on record is of a job and has no node."""

    job: str
    text: str
    seconds: float | None
    node: str = ""


@dataclass(frozen=True, slots=True)
class JobInQueue:
    """A job of the run that Slurm has not ended; `start` is the expected start in seconds since 1970."""

    job: str
    state: str
    reason: str | None
    start: int | None


@dataclass(frozen=True, slots=True)
class Failure:
    """A failure of a worker; cause, domain and outlook are as in the event `round_ended`, or empty."""

    node: str
    rank: int | None
    text: str
    log: str = ""
    cause: str = ""
    domain: str = ""
    outlook: str = ""


@dataclass(frozen=True, slots=True)
class Replacing:
    """The jobs for lost nodes: after how many seconds they are submitted, how many have been, and how many may be."""

    after: float
    submitted: int
    limit: int


@dataclass(frozen=True, slots=True)
class LiveRun:
    """The answer of a leader, which took `seconds`, with the reports of its agents, also as they came in JSON."""

    answer: StatusAnswer
    agents: Mapping[str, LiveAgent] = field(default_factory=dict)
    reports: Mapping[str, str] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    seconds: float = 0.0


def live_run(answer: StatusAnswer, reports: Mapping[str, str], seconds: float) -> LiveRun:
    """Read the answer of the leader, which took `seconds`, with the reports of its agents."""
    agents: dict[str, LiveAgent] = {}
    problems = []
    for name, text in reports.items():
        try:
            agents[name] = typed_json.decode(text, LiveAgent)
        except typed_json.JSONError as error:
            problems.append(f"the report of {name} cannot be read: {error}")
    if any(agent.schema > _SCHEMA for agent in agents.values()):
        problems.append("some agents are of a newer release: what is new in their reports is not shown")
    return LiveRun(answer, agents, reports, tuple(problems), round(seconds, 3))


def live_json(live: LiveRun) -> dict[str, Any]:
    """Return the leader's own part of a live answer as JSON."""
    answer = live.answer
    phase = {"leader": answer.leader, "phase": answer.phase, "phase_seconds": answer.seconds}
    others = ("min_nodes", "max_nodes", "asked", "answered", "silent")
    return {**phase, **{name: getattr(answer, name) for name in others}, "seconds": live.seconds}


@dataclass(frozen=True, slots=True)
class RunStatus:
    """The state of a run. Fields of ``status --json`` have the same names; docs/events.md describes them."""

    run: str
    directory: str
    state: RunState
    command: tuple[str, ...] = ()
    round: int | None = None
    reason: str = ""
    nodes: int = 0
    world_size: int = 0
    restarts: int = 0
    restarts_left: int | None = None
    step: int | None = None
    checkpoint: int | None = None
    loss: float | None = None
    loss_step: int | None = None
    steps_per_second: float | None = None
    leader: str = ""
    leader_answers: bool | None = None
    live: LiveRun | None = None
    agents: tuple[AgentView, ...] = ()
    replacing: Replacing | None = None
    notices: tuple[NoticeView, ...] = ()
    jobs: tuple[JobInQueue, ...] | None = None
    root_cause: Failure | None = None
    slow: tuple[SlowRankView, ...] = ()
    scores: tuple[RankScore, ...] = ()
    loops: tuple[Loop, ...] = ()
    events: tuple[Event, ...] = ()
    updated: float | None = None
    holds: str = ""
    problems: tuple[str, ...] = ()

    @property
    def has_domains(self) -> bool:
        """True if the agents that live, and those of the newest round, are in more than one failure domain."""
        return len({agent.domain for agent in self.agents if agent.alive or agent.round == self.round}) > 1
