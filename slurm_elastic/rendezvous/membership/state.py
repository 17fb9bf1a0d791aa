"""The leader's knowledge of the run: its agents, phase, what is under way. Frozen data only."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from slurm_elastic.rendezvous.membership._persistent import NamedMap, NameSet
from slurm_elastic.rendezvous.membership._replace import replace
from slurm_elastic.rendezvous.membership.agents import Agent, Status, WorkerFailure
from slurm_elastic.rendezvous.membership.assignment import Table
from slurm_elastic.rendezvous.membership.config import Settings
from slurm_elastic.rendezvous.membership.decisions import Decision, Finish
from slurm_elastic.rendezvous.membership.quorum import Base
from slurm_elastic.rendezvous.membership.reasons import Reason
from slurm_elastic.rendezvous.membership.stragglers import Slowest

__all__ = [
    "FailureInquest",
    "Phase",
    "Result",
    "State",
    "PlannedStop",
    "alive",
    "initial_state",
    "with_agent",
    "without_agent",
]


class Phase(enum.Enum):
    """The activity of the run."""

    FORMING = "forming"
    """No round is running; one will be published when it is complete."""
    RUNNING = "running"
    """The members of the table have their workers running."""
    CLOSED = "closed"
    """The run has ended; every agent is told so."""


_EMPTY = NameSet()


@dataclass(frozen=True)
class FailureInquest:
    """A worker failure whose cause is being looked into."""

    failure: WorkerFailure
    since: float
    probe: int
    unanswered: AbstractSet[str]
    slowest: tuple[Slowest, ...] = ()


@dataclass(frozen=True)
class PlannedStop:
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
    answers: NamedMap[int] = field(default_factory=NamedMap)
    stop: int | None = None
    gone: tuple[str, ...] = ()


@dataclass(frozen=True)
class State:
    """Everything the leader knows at one moment.

    Attributes:
        agents: by identity; absent are agents that left, were lost, or never joined.
        blocking: how many of `agents` may have workers; a round cannot close before it is 0. Kept beside `agents` so
            that a join costs no walk over all of them; so are `running` and `finished`, which count agents of that
            status, `present`, which counts those of `base` that wait, and `on_node` and `cohorts`, which count them by
            their nodes and cohorts.
        quorate: whether those that wait were found to be a quorum, and none of them has gone since.
        broken: agents whose connection is broken.
        reason: why the round that is being formed is formed.
        forming_since, complete_since: when forming began; since when the minimum is there.
        published_at: when the newest round was published.
        restarts: worker failures charged so far.
        last_failure: see :attr:`~.assignment.Table.last_failure`.
        gone_nodes: nodes that left, were lost, are down by Slurm's word, or did not come until a last call ended.
        unheard: by cohort, how many of it have not joined yet; none once a round had to do without them.
        newcomer_first, newcomer_last: when, in this running round, the first and last new agent joined.
        coming: agents that have said that they will join soon.
        gone_agents: identities that left or were lost, and the number of their last join: an older one may still be on
            its way and must not bring them back.
        heartbeat_limit: silence after which an agent is lost now: that of the newest round, or what the first needs.
        seen_until: when the last event was processed; a long gap means that the leader itself was paused.
        ticked_at: when the last tick was processed.
        calm: whether by then everybody had given the last sign of life that was due, and the agents are few.
        planned_stop: the planned end of this running round, None while nobody knows of any.
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
    heartbeat_limit: float
    calm: bool = False
    agents: NamedMap[Agent] = field(default_factory=NamedMap)
    blocking: int = 0
    running: int = 0
    finished: int = 0
    present: int = 0
    quorate: bool = False
    on_node: NamedMap[int] = field(default_factory=NamedMap)
    cohorts: NamedMap[int] = field(default_factory=NamedMap)
    broken: AbstractSet[str] = _EMPTY
    table: Table | None = None
    complete_since: float | None = None
    published_at: float = 0.0
    restarts: int = 0
    last_failure: str = ""
    inquest: FailureInquest | None = None
    gone_nodes: AbstractSet[str] = _EMPTY
    gone_agents: NamedMap[int] = field(default_factory=NamedMap)
    unheard: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    newcomer_first: float | None = None
    newcomer_last: float | None = None
    coming: AbstractSet[str] = _EMPTY
    planned_stop: PlannedStop | None = None
    probe: int = 0
    base: Base | None = None
    gone: AbstractSet[str] = _EMPTY
    lingering: AbstractSet[str] = _EMPTY
    ended: AbstractSet[str] = _EMPTY
    awaited: AbstractSet[str] = _EMPTY
    claimed: bool = True
    claiming: bool = False
    resigning: bool = False
    resign_by: float | None = None
    finish: Finish | None = None

    @property
    def tick_interval(self) -> float:
        """The leader looks at its clock at least this often; a silent agent is found at most so much late."""
        return self.heartbeat_limit / 6

    @property
    def calm_tick_interval(self) -> float:
        """While nobody is silent it wakes up only as often as signs of life are due."""
        return self.heartbeat_limit / 3

    def is_member(self, agent: Agent) -> bool:
        """Return whether this agent has a place in the round that is running."""
        return self.phase is Phase.RUNNING and self.table is not None and agent.round == self.table.round


Result = tuple[State, tuple[Decision, ...]]
"""What comes of an event: the next state, and what has to be done, in this order."""

_BLOCKING = frozenset({Status.RUNNING, Status.FINISHED, Status.STOPPING, Status.LEAVING})


def initial_state(settings: Settings, now: float) -> State:
    """The state of a leader that has just begun its term; `round` is the one that will be published next."""
    members = settings.base.members if settings.base is not None else ()
    awaited = NameSet(members) - settings.gone - settings.silent
    return State(
        settings=settings,
        phase=Phase.FORMING,
        round=settings.first_round,
        reason=settings.first_reason,
        forming_since=now,
        seen_until=now,
        ticked_at=now,
        # Members of the last round stop their workers by the limit of that one.
        heartbeat_limit=max(settings.limit_of(len(members)), settings.base.heartbeat_limit if settings.base else 0.0),
        restarts=settings.first_restarts,
        last_failure=settings.first_failure,
        base=settings.base,
        gone=NameSet(settings.gone),
        awaited=awaited,
        claimed=settings.claimed,
    )


def with_agent(state: State, agent: Agent) -> State:
    """Add or replace one agent and keep what is counted right."""
    name = agent.candidate.agent
    before = state.agents.get(name)
    changes: dict[str, Any] = {"agents": state.agents.set(name, agent)}
    if before is None or before.status is not agent.status:
        changes |= _counted(state, before, agent)
    if before is None or before.candidate is not agent.candidate:
        changes |= _located(state, before, agent)
    return replace(state, **changes)


def _counted(state: State, before: Agent | None, after: Agent | None) -> dict[str, Any]:
    old, new = (agent.status if agent is not None else None for agent in (before, after))
    known = after or before
    member = state.base is not None and known is not None and known.candidate.agent in state.base.node_of
    return {
        "present": state.present + member * ((new is Status.WAITING) - (old is Status.WAITING)),
        "blocking": state.blocking + (new in _BLOCKING) - (old in _BLOCKING),
        "running": state.running + (new is Status.RUNNING) - (old is Status.RUNNING),
        "finished": state.finished + (new is Status.FINISHED) - (old is Status.FINISHED),
        "quorate": state.quorate and old is not Status.WAITING,
    }


def _located(state: State, before: Agent | None, after: Agent | None) -> dict[str, Any]:
    nodes, cohorts = state.on_node, state.cohorts
    for agent, change in ((before, -1), (after, 1)):
        if agent is not None:
            nodes = _added(nodes, agent.candidate.node, change)
            cohorts = _added(cohorts, agent.candidate.cohort, change)
    return {"on_node": nodes, "cohorts": cohorts}


def _added(counts: NamedMap[int], name: str, change: int) -> NamedMap[int]:
    count = counts.get(name, 0) + change
    return counts.set(name, count) if count else counts.remove(name)


def alive(state: State, known: Agent, now: float) -> State:
    """Take note of a sign of life."""
    name = known.candidate.agent
    state = with_agent(state, replace(known, last_heard=now, disconnected_at=None, departed=False))
    return replace(state, broken=state.broken - {name}) if name in state.broken else state


def without_agent(state: State, name: str) -> State:
    """Forget an agent that is not coming back, and note its node as gone unless another agent is there."""
    before = state.agents[name]
    node, located = before.candidate.node, _located(state, before, None)
    return replace(
        state,
        **_counted(state, before, None),
        **located,
        agents=state.agents.remove(name),
        broken=state.broken - {name},
        gone_nodes=state.gone_nodes if node in located["on_node"] else state.gone_nodes | {node},
        gone_agents=state.gone_agents.set(name, before.attempt),
    )
