"""The status of a run as data: states, agents, notices, the root cause, and what a command exits with."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slurm_elastic.failures.history import Loop
from slurm_elastic.observe.pace import RankScore, SlowRankView
from slurm_elastic.observe.records import Event

if TYPE_CHECKING:
    # It imports msgspec.
    from slurm_elastic.observe.live import LiveAgent, LiveWorker

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


GOES_ON = frozenset({RunState.RUNNING, RunState.WAITING})


class StatusExit(enum.IntEnum):
    """Exit codes of ``slurm-elastic status``; 2 is wrong usage, as for every command."""

    FINISHED = 0
    FAILED = 1
    RUNNING = 3
    WAITING = 4
    STOPPED = 5


@dataclass(frozen=True, slots=True)
class AgentView:
    """An agent that has taken part in the run, the newest of its node and job.

    Attributes:
        node: Its node.
        job: Its job.
        agent: Its identity.
        state: ``joining``, ``spare``, ``training``, ``lost`` or ``ended``; of an agent that has answered, the stage as
            on its health port.
        since: Seconds since 1970 at which the state began.
        round: The last round in which its workers ran; None if it had none.
        rank: Its first rank in that round.
        workers: Number of its workers in that round.
        exit_code: How it ended; None before, or if it was killed.
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
    """A notice that an agent of the run got and whose job has not ended yet; seconds are those left now.

    `node` is the node of the agent, if the agent itself has told; a notice on record is for the whole job.
    """

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
class RootCause:
    """The failure that ended the run, or the last one that a restart has followed.

    Attributes:
        node: Its node.
        rank: Its rank; None if it is not known.
        text: The last words of the worker.
        log: The file with the rest.
        cause, domain, outlook: As in the event `round_ended`; empty if they are not known.
    """

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
class LiveAnswer:
    """The leader's own part of a live answer.

    Attributes:
        leader: The leader's agent.
        phase: ``forming``, ``running`` or ``closed``.
        phase_seconds: Since this phase began.
        min_nodes, max_nodes: Of the run.
        asked, answered: How many agents were asked, and how many have reported in time.
        silent: Nodes of the other agents, as a host list.
        seconds: That the answer took.
    """

    leader: str
    phase: str
    phase_seconds: float = 0.0
    min_nodes: int = 0
    max_nodes: int = 0
    asked: int = 0
    answered: int = 0
    silent: str = ""
    seconds: float = 0.0


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
    live: LiveAnswer | None = None
    agents: tuple[AgentView, ...] = ()
    replacing: Replacing | None = None
    notices: tuple[NoticeView, ...] = ()
    jobs: tuple[JobInQueue, ...] | None = None
    root_cause: RootCause | None = None
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
