"""One leader after another: what a new one waits for before it acts, and how one that has to go lets go.

A leader that follows another starts without knowing who is alive. It forms a round only with a quorum of the last one
(`config.has_quorum`), and then under an epoch of its own, which it claims as soon as it has the quorum. It waits a
moment for members that have not connected yet.
"""

from __future__ import annotations

import math

from slurm_elastic.rendezvous.membership import config, transitions
from slurm_elastic.rendezvous.membership.agents import Agent, AgentInfo, LeaveReason, Status
from slurm_elastic.rendezvous.membership.events import Claim, Gone, Leaving, Left, Resign, Resigned
from slurm_elastic.rendezvous.membership.persistent import NamedMap, replace
from slurm_elastic.rendezvous.membership.state import Phase, Result, State, with_agent


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
    return config.has_quorum(base, present, state.gone, settings.agent, settings.on_tie, lingering=state.lingering)


def begins_anew(state: State) -> bool:
    """Return whether no member of the last round is here, so that the run starts as for the first time."""
    return state.base is None or not _has_member(state, state.base)


def blocks_election(state: State) -> bool:
    """Return whether this leader, which was not in the last round, has members of it, and not enough of them.

    Members search for each other, and never for a leader that is none of them.
    """
    base = state.base
    if base is None or state.claimed or state.settings.agent in base.node_of or has_quorum(state):
        return False
    return _has_member(state, base)


def _has_member(state: State, base: config.Base) -> bool:
    """Return whether a member of the last round is here. Asked after every event; mostly the first agent is one."""
    return any(name in base.node_of for name in state.agents)


def misses_members(state: State) -> bool:
    """Return whether the fate of absent members of the last round matters now: to a leader that cannot publish, or does
    not want to yet.

    It does not while a round runs, nor to a leader that has its quorum and waits for no member.
    """
    return state.phase is Phase.FORMING and (bool(state.awaited) or not has_quorum(state))


def missing(state: State) -> tuple[str, ...]:
    """Members of the last round that are absent, and whose fate matters now."""
    base, gone = state.base, state.gone - state.lingering
    if base is None or not misses_members(state):
        return ()
    present = set(state.agents)
    return tuple(name for name in base.members if name not in present and name not in gone)


def gone(state: State, event: Gone, now: float) -> Result:
    """Note that some processes have ended."""
    there = [name for name in event.agents & state.agents.keys() if not state.agents[name].departed]
    state, decisions = transitions.give_up_all(state, dict.fromkeys(there, "its process has ended"), now)
    base = state.base
    if base is None:
        return state, decisions
    ended = event.agents & base.node_of.keys()
    nodes = {node for node in map(base.node_of.__getitem__, ended) if node not in state.on_node}
    state = replace(
        state,
        gone=state.gone | ended,
        lingering=state.lingering - ended,
        ended=state.ended | ended,
        awaited=state.awaited.without(*ended),
        gone_nodes=state.gone_nodes | nodes,
    )
    return state, decisions


def nodes_down(state: State, down: frozenset[str]) -> State:
    """Count members of the last round as gone whose nodes are down by Slurm, if they are not here."""
    base = state.base
    if base is None:
        return state
    dead = {agent for agent, node in base.node_of.items() if node in down and agent not in state.agents}
    return replace(
        state, gone=state.gone | dead, lingering=state.lingering - dead, awaited=state.awaited.without(*dead)
    )


def absent_member_leaves(state: State, event: Leaving | Left) -> State:
    """Note that a member of the last round leaves that has no place in `agents`: it will join no leader."""
    name = event.agent
    if state.base is None or name not in state.base.node_of or name in state.agents:
        return state
    if isinstance(event, Leaving) and name in state.ended:
        # Said before its end and come after it, by a connection that was replaced.
        return state
    # Its workers run until its Left.
    lingering = state.lingering | {name} if isinstance(event, Leaving) else state.lingering - {name}
    return replace(
        state, gone=state.gone | {name}, lingering=lingering, awaited=state.awaited.without(name), quorate=False
    )


def expect_join(state: State, name: str, now: float) -> State:
    """Wait for a member of the last round that has connected: it may have workers until it joins."""
    base = state.base
    assert base is not None
    node = base.node_of[name]
    # Its data come with its join.
    unknown = AgentInfo(name, node, position=0, local_world_size=0, role="", address="", store_port=0)
    agent = Agent(unknown, attempt=0, status=Status.STOPPING, last_message_at=now, round=base.round)
    return with_agent(replace(state, awaited=state.awaited.without(name)), agent)


def waiting_ends(state: State) -> float:
    """Return when the wait for members that have not connected ends; infinity without such a wait."""
    if not state.awaited or state.phase is not Phase.FORMING:
        return math.inf
    return state.forming_since + state.heartbeat_limit


def stop_waiting(state: State, now: float) -> State:
    """Wait no longer for members that have had their time to come."""
    base = state.base
    if base is None or now < waiting_ends(state):
        return state
    nodes = {node for agent, node in base.node_of.items() if agent in state.awaited}
    return replace(state, awaited=NamedMap(), gone_nodes=state.gone_nodes | nodes)


def claim(state: State) -> Result:
    """Decide to claim the term."""
    base = state.base
    lost = base.node_of.get(base.leader, "") if base is not None else ""
    return replace(state, claiming=True), (Claim(lost),)


def leader_goes(state: State, event: Leaving | Left, deadline: float) -> State:
    """Note, of any agent's leave, if the leader's own agent goes; it stays for the end of a run that it has finished.

    The workers of others have to stop for it by the deadline.
    """
    if event.agent != state.settings.agent or event.reason is LeaveReason.FINISHED:
        return state
    return replace(state, resigning=True, resign_by=deadline)


def resign(state: State) -> Result:
    """Resign once no agent has workers, and the leader's own agent has left."""
    own = state.settings.agent
    if state.blocking or own in state.agents or own in state.lingering:
        return state, ()
    resigned = Resigned(own, tuple(sorted(state.gone - state.lingering)))
    closed = replace(state, phase=Phase.CLOSED, broken=NamedMap())
    return closed, (Resign(tuple(state.agents), resigned, everyone=True),)
