"""The membership machine: one event in, the next state and the decisions out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from slurm_elastic.rendezvous.membership import join_leave, leader_change, planned_stop, transitions
from slurm_elastic.rendezvous.membership._persistent import NamedMap, NameSet, replace
from slurm_elastic.rendezvous.membership.advance import advance
from slurm_elastic.rendezvous.membership.agents import Status, root_of
from slurm_elastic.rendezvous.membership.decisions import Decision, Send
from slurm_elastic.rendezvous.membership.events import (
    Claimed,
    Closed,
    Connected,
    Disconnected,
    Event,
    Finished,
    Gone,
    Held,
    Joined,
    Leaving,
    Left,
    NodesDown,
    Ponged,
    Returning,
    SignsOfLife,
    Tick,
    WorkerFailed,
)
from slurm_elastic.rendezvous.membership.messages import Outcome, Probed
from slurm_elastic.rendezvous.membership.state import FailureInquest, Result, State, alive, with_agent

_FEW = 64
"""Agents that are asked for signs of life all together."""


def step(state: State, event: Event, now: float) -> Result:
    """Process one event.

    Args:
        state: as the last step left it.
        event: what happened.
        now: leader's monotonic time in seconds; never smaller than in the last step.

    Returns:
        The next state, and what has to be done, in this order.
    """
    state = _forgive_own_pause(state, now)
    state, decisions = _HANDLERS[type(event)](state, event, now)
    state, consequences = advance(state, now, ticked=isinstance(event, Tick))
    return state, decisions + consequences


def _forgive_own_pause(state: State, now: float) -> State:
    """Extend all time limits if the leader itself was paused: it has received nothing meanwhile.

    Messages may still lie unread in the sockets, so no deadline comes nearer by such a gap.
    """
    gap = now - state.seen_until
    if gap <= state.tick_interval * (3 if state.calm else 2):
        return replace(state, seen_until=now)

    def later(moment: float | None) -> float | None:
        # Rounded, a sum may be later than now.
        return None if moment is None else min(moment + gap, now)

    # A message of an agent that was overdue already, and only waited for a tick, may have arrived meanwhile, too.
    latest = now - state.heartbeat_limit

    inquest, stop_planned = state.inquest, state.planned_stop
    return replace(
        state,
        agents=NamedMap(
            (
                name,
                replace(
                    agent,
                    last_message_at=max(agent.last_message_at + gap, latest),
                    disconnected_at=later(agent.disconnected_at),
                ),
            )
            for name, agent in state.agents.items()
        ),
        first_broken_at=later(state.first_broken_at),
        inquest=None if inquest is None else replace(inquest, since=inquest.since + gap),
        forming_since=state.forming_since + gap,
        complete_since=later(state.complete_since),
        newcomer_first=later(state.newcomer_first),
        newcomer_last=later(state.newcomer_last),
        # Not its deadline: what ends a departing agent does not wait either.
        planned_stop=None if stop_planned is None else replace(stop_planned, since=stop_planned.since + gap),
        seen_until=now,
    )


def _signs_of_life(state: State, event: SignsOfLife, now: float) -> Result:
    updated = {}
    for name, moment in event.signs:
        agent = state.agents.get(name)
        if agent is not None and moment > agent.last_message_at:
            updated[name] = replace(agent, last_message_at=moment)
    return (replace(state, agents=state.agents.update(updated)) if updated else state), ()


def _ponged(state: State, event: Ponged, now: float) -> Result:
    agent = state.agents.get(event.agent)
    if agent is None:
        return state, ()
    state = alive(state, agent, now)
    inquest = state.inquest
    if inquest is not None and inquest.probe == event.probe:
        if event.agent in inquest.unanswered:
            inquest = replace(inquest, positions=(*inquest.positions, *event.positions))
        inquest = replace(inquest, unanswered=inquest.unanswered - {event.agent})
        state = replace(state, inquest=inquest)
    return state, ()


def _worker_failed(state: State, event: WorkerFailed, now: float) -> Result:
    agent = state.agents.get(event.agent)
    if agent is None:
        return state, ()
    state = alive(state, agent, now)
    table = state.table
    if table is None or table.round != event.round or not state.is_member(agent):
        return state, ()
    roots = frozenset({event.agent} if not event.failure.consequence else ())
    if (inquest := state.inquest) is not None:
        inquest = replace(inquest, failed=inquest.failed | {event.agent}, roots=inquest.roots | roots)
        root = root_of((inquest.failure, event.failure))
        if root is not inquest.failure:
            inquest = replace(inquest, failure=root)
        asks = event.failure.stalled and not inquest.dumps
        inquest = replace(inquest, dumps=inquest.dumps or asks)
        # Again, to members that have answered a probe that asked for no dumps.
        decisions = (Send(_members(state), Probed(inquest.probe, dumps=True)),) if asks else ()
        return replace(state, inquest=inquest), decisions
    # A dead node makes the workers of its peers fail: all members are probed before a worker is charged. The one that
    # reports it is probed, too, as its own node may be dying.
    asked, dumps = _members(state), event.failure.stalled
    inquest = FailureInquest(
        event.failure,
        now,
        state.probe + 1,
        NameSet(asked),
        dumps=dumps,
        failed=frozenset({event.agent}),
        roots=roots,
    )
    return replace(state, inquest=inquest, probe=state.probe + 1), (Send(asked, Probed(inquest.probe, dumps)),)


def _members(state: State) -> tuple[str, ...]:
    """Return the members of the round that have not departed."""
    return tuple(
        place.agent
        for place in (state.table.places if state.table is not None else ())
        if (member := state.agents.get(place.agent)) is not None and not member.departed
    )


def _finished(state: State, event: Finished, now: float) -> Result:
    agent = state.agents.get(event.agent)
    if agent is None:
        return state, ()
    state = alive(state, agent, now)
    if state.is_member(agent) and agent.round == event.round and agent.status is Status.RUNNING:
        state = with_agent(state, replace(state.agents[event.agent], status=Status.FINISHED))
    return state, ()


def _closed(state: State, event: Closed, now: float) -> Result:
    return transitions.finish(state, Outcome.CLOSED, detail=f"closed by {event.agent}")


def _claimed(state: State, event: Claimed, now: float) -> Result:
    return replace(state, claimed=True), ()


def _nodes_down(state: State, event: NodesDown, now: float) -> Result:
    present = {agent.candidate.node for agent in state.agents.values()}
    state = replace(state, gone_nodes=state.gone_nodes | (event.down - present))
    # Slurm also calls a node down whose slurmd alone has died. Signs of life come three times in a limit, and are
    # taken in before this, or with a tick.
    silence = state.heartbeat_limit * 2 / 3
    down = [
        name
        for name, agent in state.agents.items()
        if agent.candidate.node in event.down and now - agent.last_message_at > silence and not agent.departed
    ]
    decisions: tuple[Decision, ...] = ()
    for name in down:
        state, more = transitions.lose(state, name, "Slurm says that its node is down", now)
        decisions += more
    return leader_change.nodes_down(state, event.down), decisions


def _held(state: State, event: Held, now: float) -> Result:
    agent = state.agents.get(event.agent)
    return planned_stop.answer(alive(state, agent, now), event, now) if agent is not None else (state, ())


def _tick(state: State, event: Tick, now: float) -> Result:
    overdue = now - state.heartbeat_limit
    if state.calm and any(agent.last_message_at < overdue for agent in state.agents.values()):
        # No agent was missed at the last tick, so the leader itself was paused; agents that live answer until the next.
        agents = NamedMap(
            (name, replace(agent, last_message_at=max(agent.last_message_at, overdue)))
            for name, agent in state.agents.items()
        )
        state = replace(state, agents=agents)
    missed = now - state.heartbeat_limit / 2
    # The signs of very many come in turns.
    calm = len(state.agents) <= _FEW and all(agent.last_message_at >= missed for agent in state.agents.values())
    return replace(state, ticked_at=now, calm=calm), ()


_HANDLERS: dict[type, Callable[[State, Any, float], Result]] = {
    Claimed: _claimed,
    Closed: _closed,
    Connected: join_leave.connected,
    Disconnected: join_leave.disconnected,
    Finished: _finished,
    Gone: leader_change.gone,
    SignsOfLife: _signs_of_life,
    Held: _held,
    Joined: join_leave.joined,
    Leaving: join_leave.leaving,
    Left: join_leave.left,
    NodesDown: _nodes_down,
    Ponged: _ponged,
    Returning: join_leave.returning,
    Tick: _tick,
    WorkerFailed: _worker_failed,
}
