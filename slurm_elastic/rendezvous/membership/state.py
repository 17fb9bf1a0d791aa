"""What the leader knows: agents, phase, what is under way. Frozen data only."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

from slurm_elastic.rendezvous.membership.blame import Slowest
from slurm_elastic.rendezvous.membership.changes import replace
from slurm_elastic.rendezvous.membership.quorum import Base
from slurm_elastic.rendezvous.membership.reasons import LeaveReason, Reason
from slurm_elastic.rendezvous.membership.settings import Settings
from slurm_elastic.rendezvous.membership.table import Table

if TYPE_CHECKING:
    from slurm_elastic.rendezvous.membership.decisions import Finish

__all__ = [
    "Agent",
    "Candidate",
    "Judgement",
    "LeaveReason",
    "Phase",
    "Reason",
    "Settings",
    "State",
    "Status",
    "Winding",
    "WorkerFailure",
    "initial_state",
    "with_agent",
    "without_agent",
]

_DIGITS = re.compile(r"(\d+)")


class Phase(enum.Enum):
    """What the run is doing."""

    FORMING = "forming"
    """No round is running; one will be published when it is complete."""
    RUNNING = "running"
    """The members of the table have their workers running."""
    CLOSED = "closed"
    """The run has ended; every agent is told so."""


class Status(enum.Enum):
    """What one agent is doing, as far as the leader knows."""

    WAITING = "waiting"
    """Has joined, has no workers, waits for a place; also a member of a round that winds down that has stopped."""
    RUNNING = "running"
    """Member of the current round; may have announced that it leaves."""
    FINISHED = "finished"
    """Member of the current round; its workers have ended well. It keeps its place, even when it leaves or is lost."""
    STOPPING = "stopping"
    """Was interrupted; may still have workers of the round that ended."""
    LEAVING = "leaving"
    """Announced that it goes; may still have workers of the round that ended."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """What an agent says of itself when it joins.

    Attributes:
        agent: identity, unique over the run: node, job id, restart count and pid.
        node: Slurm's name of the node.
        position: index of the node in Slurm's node list; agents are ranked by it first. Agents of an array, whose
            list has one node each, all say 0 and are ranked by the natural order of their node names.
        local_world_size: number of workers that it will start, at least 1.
        role: torch's role name.
        address: host name or address at which other nodes reach it.
        store_port: port that is bound already, on which the workers' store listens if this agent becomes rank 0.
        standby_port: port on which this agent listens, and on which it leads if it has to; 0 if it never does.
        cohort: name of the srun that started this agent together with others; empty if none did.
        cohort_size: how many agents that was to start, this one included.
    """

    agent: str
    node: str
    position: int
    local_world_size: int
    role: str
    address: str
    store_port: int
    standby_port: int = 0
    cohort: str = ""
    cohort_size: int = 1

    @property
    def order(self) -> tuple[object, ...]:
        """Sort key of ranks: Slurm's order, then node names with numbers by value (node2 before node10)."""
        parts = _DIGITS.split(self.node)
        natural = tuple((0, int(part), part) if part.isdigit() else (1, 0, part) for part in parts)
        return (self.position, natural, self.agent)


@dataclass(frozen=True)
class WorkerFailure:
    """The first worker of an agent that failed by itself, for the root cause that is printed last.

    Attributes:
        agent, node, rank, exit_code: who, and how it ended.
        message: its last words.
        error_file, log: where the rest is.
        hung: whether it did not end by itself, but was killed because it did not go on.
    """

    agent: str
    node: str
    rank: int
    exit_code: int
    message: str = ""
    error_file: str = ""
    log: str = ""
    hung: bool = False

    @property
    def summary(self) -> str:
        """One line: the last of the message, which in a traceback names the error."""
        lines = self.message.split("\n")
        return lines[-1] or f"exit code {self.exit_code}"


@dataclass(frozen=True)
class Agent:
    """One agent that the leader knows to be alive, or has not yet given up.

    Attributes:
        candidate: what it said in its newest join.
        attempt: number of that join; an agent counts its joins from 1.
        status: see :class:`Status`.
        last_heard: leader's monotonic time of the last sign of life.
        disconnected_at: since when its connection is broken, None while it stands.
        round: the last round it had a place in, None before the first.
        leave_reason: set from the announcement on.
        leave_deadline: when its workers have to stop, in leader's monotonic time, by its newest announcement.
        departed: it finished its part of the round and went, or was lost afterwards; it counts for this round only.
    """

    candidate: Candidate
    attempt: int
    status: Status
    last_heard: float
    disconnected_at: float | None = None
    round: int | None = None
    leave_reason: LeaveReason | None = None
    leave_deadline: float | None = None
    departed: bool = False


@dataclass(frozen=True)
class Judgement:
    """A worker failure whose cause is being looked into."""

    failure: WorkerFailure
    since: float
    probe: int
    unanswered: frozenset[str]
    slowest: tuple[Slowest, ...] = ()


@dataclass(frozen=True)
class Winding:
    """The planned end of the round that runs.

    Attributes:
        reason, node, detail: why, as it will be said of the next round.
        since: when the members were asked for the earliest step at which their workers can stop.
        deadline: leader's monotonic time at which whoever still runs is interrupted; None while nobody has to be gone
            by a known time.
        answers: by agent, the step that it named.
        stop: the step at which all workers stop; None until everybody has answered.
        gone: members that left after their workers had stopped there. They may wait, to serve the workers' store, until
            the others have.
    """

    reason: Reason
    node: str
    detail: str
    since: float
    deadline: float | None = None
    answers: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    stop: int | None = None
    gone: tuple[str, ...] = ()


@dataclass(frozen=True)
class State:
    """Everything the leader knows at one moment.

    Attributes:
        agents: by identity; absent are agents that left, were lost, or never joined.
        blocking: how many of `agents` may have workers; a round cannot close before it is 0. Kept beside `agents` so
            that a join costs no walk over all of them.
        broken: agents whose connection is broken.
        reason: why the round that is being formed is formed.
        forming_since, complete_since: when forming began; since when the minimum is there.
        published_at: when the newest round was published.
        restarts: worker failures charged so far.
        gone_nodes: nodes that left, were lost, are down by Slurm's word, or did not come until a last call ended.
        unheard: by cohort, how many of it have not joined yet; none once a round had to do without them.
        newcomer_first, newcomer_last: when, in this running round, the first and last new agent joined.
        coming: agents that have said that they will join soon.
        gone_agents: identities that left or were lost, and the number of their last join: an older one may still be on
            its way and must not bring them back.
        seen_until: when the last event was processed; a long gap means that the leader itself was paused.
        ticked_at: when the last tick was processed.
        calm: whether by then everybody had given the last sign of life that was due, and the agents are few.
        winding: the planned end of this running round, None while nobody knows of any.
        probe: number of the last probe.
        base: the last published round, whoever published it.
        gone: members of `base` that are known to be gone for good: they join nobody any more.
        lingering: those of `gone` that may have workers still: they have said that they go, and nothing since.
        ended: members of `base` that have no workers any more: they have said farewell, or their process has ended.
        awaited: members of `base` that this leader has not heard of yet.
        claimed, claiming: whether the epoch is the leader's own, and whether it has been asked for.
        resigning: whether the leader's own agent goes, so that somebody else has to lead.
        resign_by: when workers have to stop for that, in leader's monotonic time; None if they may take their time.
        finish: how the run ended, once it has.
    """

    settings: Settings
    phase: Phase
    round: int
    reason: Reason
    forming_since: float
    seen_until: float
    ticked_at: float
    calm: bool = False
    agents: Mapping[str, Agent] = field(default_factory=lambda: MappingProxyType({}))
    blocking: int = 0
    broken: frozenset[str] = frozenset()
    table: Table | None = None
    complete_since: float | None = None
    published_at: float = 0.0
    restarts: int = 0
    judgement: Judgement | None = None
    gone_nodes: frozenset[str] = frozenset()
    gone_agents: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    unheard: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    newcomer_first: float | None = None
    newcomer_last: float | None = None
    coming: frozenset[str] = frozenset()
    winding: Winding | None = None
    probe: int = 0
    base: Base | None = None
    gone: frozenset[str] = frozenset()
    lingering: frozenset[str] = frozenset()
    ended: frozenset[str] = frozenset()
    awaited: frozenset[str] = frozenset()
    claimed: bool = True
    claiming: bool = False
    resigning: bool = False
    resign_by: float | None = None
    finish: Finish | None = None

    def is_member(self, agent: Agent) -> bool:
        """Whether this agent has a place in the round that is running."""
        return self.phase is Phase.RUNNING and self.table is not None and agent.round == self.table.round


_BLOCKING = frozenset({Status.RUNNING, Status.FINISHED, Status.STOPPING, Status.LEAVING})


def initial_state(settings: Settings, now: float) -> State:
    """The state of a leader that has just begun its term; `round` is the one that will be published next."""
    members = settings.base.members if settings.base is not None else ()
    awaited = frozenset(members) - settings.gone - settings.silent
    return State(
        settings=settings,
        phase=Phase.FORMING,
        round=settings.first_round,
        reason=settings.first_reason,
        forming_since=now,
        seen_until=now,
        ticked_at=now,
        restarts=settings.first_restarts,
        base=settings.base,
        gone=settings.gone,
        awaited=awaited,
        claimed=settings.claimed,
    )


def with_agent(state: State, agent: Agent) -> State:
    """Add or replace one agent and keep `blocking` right."""
    name = agent.candidate.agent
    before = state.agents.get(name)
    blocking = state.blocking + (agent.status in _BLOCKING) - (before is not None and before.status in _BLOCKING)
    return replace(state, agents={**state.agents, name: agent}, blocking=blocking)


def without_agent(state: State, name: str) -> State:
    """Forget an agent that is not coming back, and note its node as gone unless another agent is there."""
    before = state.agents[name]
    node = before.candidate.node
    agents = {key: value for key, value in state.agents.items() if key != name}
    shared = any(other.candidate.node == node for other in agents.values())
    return replace(
        state,
        agents=agents,
        blocking=state.blocking - (before.status in _BLOCKING),
        broken=state.broken - {name},
        gone_nodes=state.gone_nodes if shared else state.gone_nodes | {node},
        gone_agents={**state.gone_agents, name: before.attempt},
    )
