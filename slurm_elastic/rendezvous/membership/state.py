"""The leader's knowledge of the run: its agents, phase, what is under way. Frozen data only."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from slurm_elastic.rendezvous.membership.agents import Agent, AgentInfo, Reason, Status, WorkerFailure
from slurm_elastic.rendezvous.membership.assignment import Place, Table, nodes_in_segments
from slurm_elastic.rendezvous.membership.config import Base, Settings
from slurm_elastic.rendezvous.membership.events import Decision, Finish
from slurm_elastic.rendezvous.membership.persistent import NamedMap, replace
from slurm_elastic.rendezvous.membership.stragglers import WorkerPosition


class Phase(enum.Enum):
    """The activity of the run."""

    FORMING = "forming"
    """No round is running; one will be published when it is complete."""
    RUNNING = "running"
    """The members of the table have their workers running."""
    CLOSED = "closed"
    """The run has ended; every agent gets the message."""


@dataclass(frozen=True)
class FailureInquest:
    """A worker failure whose cause is being looked into.

    Attributes:
        since: Leader's monotonic time of the first one.
        unanswered: Members that have not answered the newest probe, which asks about it.
        dumps: True if the members were asked for the dumps of their workers.
        failed, roots: Agents that have reported a failure; those of them whose failure is no consequence.
    """

    failure: WorkerFailure
    since: float
    unanswered: NamedMap[None]
    positions: tuple[WorkerPosition, ...] = ()
    dumps: bool = False
    failed: frozenset[str] = frozenset()
    roots: frozenset[str] = frozenset()


@dataclass(frozen=True)
class PlannedStop:
    """The planned end of the round that runs.

    Attributes:
        since: Leader's monotonic time when it asked the members for the earliest step at which their workers can stop.
        deadline: Leader's monotonic time at which it interrupts members that still run.
        answers: The step that each member named, by its identity.
        gone: Members that left after their workers had stopped there. They may wait, to serve the workers' store, until
            the others have left.
    """

    reason: Reason
    node: str
    detail: str
    since: float
    deadline: float = math.inf
    answers: NamedMap[int] = field(default_factory=NamedMap)
    stop: int | None = None
    gone: tuple[str, ...] = ()


@dataclass(frozen=True)
class State:
    """Everything the leader knows at one moment. All times are the leader's monotonic time, in seconds.

    Attributes:
        round: Number of the next round while one is formed, else of the one that runs.
        agents: The agents by identity, without those that left, were lost, or never joined.
        blocking: Number of `agents` that may have workers; the next round waits until it is 0. The state counts it
            beside `agents`, so that a join costs no walk over all of them; likewise `running` and `finished`, the
            numbers of agents of that status, `present`, the number of those of `base` that wait, and `on_node` and
            `cohorts`, their numbers by node and by cohort.
        quorate: True if those that wait were found to be a quorum, and none of them has gone since.
        broken: Since when the connection of an agent is broken, by identity.
        first_broken_at: A time before which none of these connections broke. A tick finds out which one broke first;
            looked for after each event, it would cost the square of their number where many break at once.
        table: The newest round that this leader has published; None before its first.
        forming_since, complete_since: When forming began, and since when `min_nodes` agents wait.
        published_at: When the leader published the newest round.
        ran: Numbers of nodes with which a round has worked, each with the seconds that its workers ran at least.
        unusable: Numbers of nodes with which the workers failed before their first step, though another number worked.
        unusable_failure: The last of these failures; None before.
        inquest: The worker failure whose cause is being looked into; None while there is none.
        gone_nodes: Names of nodes that left, were lost, are down according to Slurm, or did not join before a last call
            ended.
        not_joined: Number of agents that have not joined yet, by cohort; 0 once a round went on without them.
        newcomers: When the first and the last new agent joined during the running round; None if none has.
        coming: Identities of the agents that have announced their join.
        gone_agents: Identities that left or were lost, and the number of their last join: an older one may still be on
            its way and must not bring them back.
        heartbeat_limit: Silence in seconds after which an agent is lost now: that of the newest round, or what the
            first needs.
        seen_until: When the leader processed the last event; after a long gap it was paused itself.
        ticked_at: When it processed the last tick.
        calm: True if by then all agents had given the last sign of life that was due, and the agents are few.
        base: The last published round, of this leader or an earlier one.
        gone: Members of `base` that join no leader any more.
        lingering: Members in `gone` that may still have workers: they announced their leave, and have sent nothing
            since.
        ended: Members of `base` that have no workers any more: they have left, or their process has ended.
        awaited: Members of `base` that have not connected to this leader yet.
        claimed, claiming: True if the records name this leader as that of the incarnation; True if it has asked for
            that.
        resigning: True if the leader's own agent leaves, so that another agent has to lead.
        resign_by: When workers have to stop for that.
        finish: How the run ended; None until it has.
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
    broken: NamedMap[float] = field(default_factory=NamedMap)
    first_broken_at: float = math.inf
    table: Table | None = None
    complete_since: float | None = None
    published_at: float = 0.0
    restarts: int = 0
    last_failure: str = ""
    ran: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    unusable: frozenset[int] = frozenset()
    unusable_failure: WorkerFailure | None = None
    inquest: FailureInquest | None = None
    gone_nodes: frozenset[str] = frozenset()
    gone_agents: NamedMap[int] = field(default_factory=NamedMap)
    not_joined: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    newcomers: tuple[float, float] | None = None
    coming: frozenset[str] = frozenset()
    planned_stop: PlannedStop | None = None
    probe: int = 0
    base: Base | None = None
    gone: frozenset[str] = frozenset()
    lingering: frozenset[str] = frozenset()
    ended: frozenset[str] = frozenset()
    awaited: NamedMap[None] = field(default_factory=NamedMap)
    claimed: bool = True
    claiming: bool = False
    resigning: bool = False
    resign_by: float = math.inf
    finish: Finish | None = None

    @property
    def tick_interval(self) -> float:
        """Seconds between ticks at most; the leader finds a silent agent at most this late.

        While no agent is silent those between two heartbeats.
        """
        return self.heartbeat_limit / (3 if self.calm else 6)

    def round_size(self, agents: int) -> int:
        """Return how many of the waiting agents a round takes, 0 if it cannot be formed.

        That is the largest valid number that the script can use; after a round with one that it cannot, the largest
        that has worked if there is one.
        """
        settings = self.settings
        if not self.unusable:
            return settings.round_size(agents)
        if self.phase is Phase.FORMING and self.base is not None and len(self.base.members) in self.unusable:
            worked = (size for size in self.ran if size <= agents and size not in self.unusable)
            largest = max((size for size in worked if settings.round_size(size) == size), default=0)
            if largest:
                return largest
        size = settings.round_size(agents)
        while size in self.unusable:
            size = settings.round_size(size - 1)
        return size

    @property
    def usable(self) -> int:
        """The number of agents that the next round could take: those in whole segments."""
        segment = self.settings.segment
        return len(self.agents) if segment == 1 else nodes_in_segments(self.agents.values(), segment)

    @property
    def why_unusable(self) -> str:
        """The reason why the script cannot use a number of nodes, in words; of several the last one."""
        failure, sizes = self.unusable_failure, sorted(self.unusable)
        if failure is None:
            return f"the script failed before its first step with {', '.join(map(str, sizes))} nodes"
        count = len(self.places)
        nodes = f"{count} node{'s' if count != 1 else ''}"
        return f"with {nodes} {failure.script or 'the script'} failed before its first step ({failure.summary})"

    @property
    def places(self) -> tuple[Place, ...]:
        """The places in the newest round that this leader has published."""
        return self.table.places if self.table is not None else ()

    def is_member(self, agent: Agent) -> bool:
        """Return whether this agent has a place in the round that is running."""
        return self.phase is Phase.RUNNING and agent.round == self.round


Result = tuple[State, tuple[Decision, ...]]
"""The result of an event: the next state, and the decisions, in the order in which they are carried out."""


def initial_state(settings: Settings, now: float) -> State:
    """Return the state of a leader that begins its term."""
    members = settings.base.members if settings.base is not None else ()
    awaited = dict.fromkeys(name for name in members if name not in settings.gone and name not in settings.silent)
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
        ran=dict(settings.first_ran),
        unusable=frozenset(settings.first_unusable),
        base=settings.base,
        gone=settings.gone,
        awaited=NamedMap(awaited),
        claimed=settings.claimed,
    )


def with_agent(state: State, agent: Agent) -> State:
    """Return the state with this agent, added or replaced, and with the numbers that count it."""
    name = agent.candidate.agent
    before = state.agents.get(name)
    changes: dict[str, Any] = {"agents": state.agents.set(name, agent)}
    if before is None or before.status is not agent.status:
        changes |= _counted(state, before, agent)
    if before is None or not _at_one_place(before.candidate, agent.candidate):
        changes |= _located(state, before, agent)
    return replace(state, **changes)


def _at_one_place(before: AgentInfo, after: AgentInfo) -> bool:
    return before is after or (before.node == after.node and before.cohort == after.cohort)


def _counted(state: State, before: Agent | None, after: Agent | None) -> dict[str, Any]:
    old, new = (agent.status if agent is not None else None for agent in (before, after))
    newest = after or before
    member = state.base is not None and newest is not None and newest.candidate.agent in state.base.node_of
    return {
        "present": state.present + member * ((new is Status.WAITING) - (old is Status.WAITING)),
        "blocking": state.blocking + (new not in (None, Status.WAITING)) - (old not in (None, Status.WAITING)),
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
    return counts.set(name, count) if count else counts.without(name)


def alive(state: State, agent: Agent, now: float, **changes: Any) -> State:
    """Return the state after a message of an agent, which changes these fields of it."""
    name = agent.candidate.agent
    state = with_agent(state, replace(agent, last_message_at=now, departed=False, **changes))
    return replace(state, broken=state.broken.without(name)) if name in state.broken else state


def answered(state: State, name: str) -> State:
    """Return the state in which no answer of an agent to a probe is awaited."""
    inquest = state.inquest
    if inquest is None or name not in inquest.unanswered:
        return state
    return replace(state, inquest=replace(inquest, unanswered=inquest.unanswered.without(name)))


def without_agent(state: State, name: str) -> State:
    """Return the state without an agent that does not come back; its node is gone unless another agent is there."""
    state = answered(state, name)
    before = state.agents[name]
    node, located = before.candidate.node, _located(state, before, None)
    return replace(
        state,
        **_counted(state, before, None),
        **located,
        agents=state.agents.without(name),
        broken=state.broken.without(name),
        gone_nodes=state.gone_nodes if node in located["on_node"] else state.gone_nodes | {node},
        gone_agents=state.gone_agents.set(name, before.attempt),
    )
