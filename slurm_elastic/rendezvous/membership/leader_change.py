"""One leader after another: what a new one waits for before it acts, and how one that has to go lets go.

A leader that follows another starts without knowing who is alive. It forms a round only with a quorum of the last one
(:mod:`.quorum`), and then under an epoch of its own, which it claims as soon as it has the quorum. It waits a moment
for the members that it has not heard of.
"""

from __future__ import annotations

from slurm_elastic.rendezvous.membership import quorum, transitions
from slurm_elastic.rendezvous.membership._persistent import NameSet
from slurm_elastic.rendezvous.membership._replace import replace
from slurm_elastic.rendezvous.membership.agents import Agent, AgentInfo, Status
from slurm_elastic.rendezvous.membership.decisions import Claim, Decision, Resign
from slurm_elastic.rendezvous.membership.events import Gone, Leaving, Left
from slurm_elastic.rendezvous.membership.reasons import LeaveReason
from slurm_elastic.rendezvous.membership.state import Phase, Result, State, with_agent

__all__ = [
    "begins_anew",
    "claim",
    "farewell",
    "gone",
    "has_quorum",
    "in_the_way",
    "leader_goes",
    "stop_waiting",
    "meet",
    "misses_members",
    "missing",
    "nodes_down",
    "waiting_ends",
    "resign",
]


def has_quorum(state: State) -> bool:
    """Return whether those that wait may form the next round.

    Asked after every event. A quorum is lost only with one of those that wait, and fewer members than a half of
    those that may live are none, so nearly always the leader counts no agent.
    """
    base, settings = state.base, state.settings
    if base is None or state.quorate:
        return True
    if 2 * state.present < len(base.members) - len(state.gone):
        return False
    present = frozenset(name for name, agent in state.agents.items() if agent.status is Status.WAITING)
    return quorum.has_quorum(base, present, state.gone, settings.agent, settings.on_tie, lingering=state.lingering)


def begins_anew(state: State) -> bool:
    """Return whether nobody is here who was in the last round: those who come are the first, again."""
    return state.base is None or not _has_member(state, state.base)


def in_the_way(state: State) -> bool:
    """Return whether this leader, which was not in the last round, has members of it, and not enough of them.

    They look for each other and find each other, but nobody looks for a leader that is none of them.
    """
    base = state.base
    if base is None or state.claimed or state.settings.agent in base.node_of or has_quorum(state):
        return False
    return _has_member(state, base)


def _has_member(state: State, base: quorum.Base) -> bool:
    """Return whether a member of the last round is here. Asked after every event; mostly the first agent is one."""
    return any(name in base.node_of for name in state.agents)


def misses_members(state: State) -> bool:
    """Return whether the fate of absent members of the last round matters now: to a leader that cannot publish, or does
    not want to yet.

    It does not while a round runs, nor to a leader that has its quorum and waits for nobody.
    """
    return state.phase is Phase.FORMING and (bool(state.awaited) or not has_quorum(state))


def missing(state: State) -> tuple[str, ...]:
    """Members of the last round that are absent, and whose fate matters now."""
    if not misses_members(state):
        return ()
    return quorum.unaccounted(state.base, set(state.agents), state.gone - state.lingering)


def gone(state: State, event: Gone, now: float) -> Result:
    """Some processes have ended."""
    base = state.base
    if base is None:
        return state, ()
    ended = event.agents & base.node_of.keys()
    decisions: tuple[Decision, ...] = ()
    for name in sorted(ended & state.agents.keys()):
        if not state.agents[name].departed:
            state, more = transitions.lose(state, name, "its process has ended", now)
            decisions += more
    nodes = {node for agent, node in zip(base.members, base.nodes, strict=True) if agent in ended}
    nodes -= {agent.candidate.node for agent in state.agents.values()}
    state = replace(
        state,
        gone=state.gone | ended,
        lingering=state.lingering - ended,
        ended=state.ended | ended,
        awaited=state.awaited - ended,
        gone_nodes=state.gone_nodes | nodes,
    )
    return state, decisions


def nodes_down(state: State, down: frozenset[str]) -> State:
    """Slurm's word also counts for members of the last round that are not here."""
    base = state.base
    if base is None:
        return state
    dead = {
        agent
        for agent, node in zip(base.members, base.nodes, strict=True)
        if node in down and agent not in state.agents
    }
    return replace(state, gone=state.gone | dead, lingering=state.lingering - dead, awaited=state.awaited - dead)


def farewell(state: State, event: Leaving | Left) -> State:
    """A member of the last round that this leader has given up, or never known, goes, and will join nobody."""
    name = event.agent
    if state.base is None or name not in state.base.node_of or name in state.agents:
        return state
    if isinstance(event, Leaving) and name in state.ended:
        # Said before its end and come after it, by a connection that was replaced.
        return state
    # Its workers run until it says farewell.
    lingering = state.lingering | {name} if isinstance(event, Leaving) else state.lingering - {name}
    return replace(state, gone=state.gone | {name}, lingering=lingering, awaited=state.awaited - {name}, quorate=False)


def meet(state: State, name: str, now: float) -> State:
    """A member of the last round has found this leader. It may have workers, so it is waited for until it joins."""
    base = state.base
    if base is None:
        raise ValueError("nobody is awaited without a last round")
    node = base.node_of[name]
    # What it says of itself comes with its join.
    unknown = AgentInfo(name, node, position=0, local_world_size=0, role="", address="", store_port=0)
    met = Agent(unknown, attempt=0, status=Status.STOPPING, last_heard=now, round=base.round)
    return with_agent(replace(state, awaited=state.awaited - {name}), met)


def waiting_ends(state: State) -> float | None:
    """When members that this leader has never heard of are not waited for any longer."""
    if not state.awaited or state.phase is not Phase.FORMING:
        return None
    return state.forming_since + state.heartbeat_limit


def stop_waiting(state: State, now: float) -> State:
    """Wait no longer for members that have had their time to come."""
    base, due = state.base, waiting_ends(state)
    if base is None or due is None or now < due:
        return state
    nodes = {node for agent, node in zip(base.members, base.nodes, strict=True) if agent in state.awaited}
    return replace(state, awaited=NameSet(), gone_nodes=state.gone_nodes | nodes)


def claim(state: State) -> Result:
    """Ask for the epoch."""
    base = state.base
    known = dict(zip(base.members, base.nodes, strict=True)) if base is not None else {}
    return replace(state, claiming=True), (Claim(known.get(base.leader, "") if base is not None else ""),)


def leader_goes(state: State, event: Leaving | Left, deadline: float | None = None) -> State:
    """Note that the leader's own agent goes; it stays for the end of a run that it has finished.

    Args:
        state: of the leader.
        event: what any agent says.
        deadline: when the workers of others have to stop for it, in leader's monotonic time.
    """
    if event.agent != state.settings.agent or event.reason is LeaveReason.FINISHED:
        return state
    return replace(state, resigning=True, resign_by=deadline)


def resign(state: State) -> Result:
    """Let go when nobody has workers and the leader's own agent is through."""
    own = state.settings.agent
    if state.blocking or own in state.agents or own in state.lingering:
        return state, ()
    return replace(state, phase=Phase.CLOSED, broken=NameSet()), (Resign(tuple(state.agents)),)
