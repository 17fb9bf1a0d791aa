"""The membership machine: one event in, the next state and the decisions out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from slurm_elastic.rendezvous.membership import transitions
from slurm_elastic.rendezvous.membership.conditions import advance
from slurm_elastic.rendezvous.membership.decisions import Decision, Interrupt, Outcome, Probe, Resend, Spare
from slurm_elastic.rendezvous.membership.events import (
    Closed,
    Connected,
    Disconnected,
    Event,
    Finished,
    Heard,
    Joined,
    Leaving,
    Left,
    NodesSeen,
    Ponged,
    Tick,
    WorkerFailed,
)
from slurm_elastic.rendezvous.membership.state import (
    Agent,
    Judgement,
    LeaveReason,
    Phase,
    Reason,
    State,
    Status,
    with_agent,
)

__all__ = ["next_deadline", "step"]

Result = tuple[State, tuple[Decision, ...]]


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
    state, consequences = advance(state, now, look_for_silence=isinstance(event, Tick))
    return state, decisions + consequences


def next_deadline(state: State) -> float:
    """When the machine wants to see a :class:`~.events.Tick` at the latest, in leader's monotonic time."""
    settings = state.settings
    deadlines = [state.seen_until + settings.tick_interval]
    for name in state.broken:
        broken_since = state.agents[name].disconnected_at
        if broken_since is not None:
            deadlines.append(broken_since + settings.reconnect_grace)
    if state.judgement is not None:
        deadlines.append(state.judgement.since + settings.settle_time)
    if state.newcomer_first is not None and state.newcomer_last is not None:
        deadlines.append(min(state.newcomer_first + settings.gather_limit, state.newcomer_last + settings.gather_quiet))
    if state.complete_since is not None:
        deadlines.append(state.complete_since + settings.last_call_timeout)
    # What lies in the past waits for something other than time.
    return min((deadline for deadline in deadlines if deadline > state.seen_until), default=deadlines[0])


def _forgive_own_pause(state: State, now: float) -> State:
    """A leader that was stopped for a while has heard nobody: that is its own silence, not theirs."""
    interval = state.settings.tick_interval
    pause = now - state.seen_until - interval
    if pause <= interval:
        return replace(state, seen_until=now)
    agents = {
        name: replace(
            agent,
            last_heard=agent.last_heard + pause,
            disconnected_at=None if agent.disconnected_at is None else agent.disconnected_at + pause,
        )
        for name, agent in state.agents.items()
    }
    return replace(state, agents=agents, seen_until=now)


def _joined(state: State, event: Joined, now: float) -> Result:
    name = event.candidate.agent
    if state.finish is not None:
        return state, (replace(state.finish, agents=(name,)),)
    known = state.agents.get(name)
    if known is None:
        return _newcomer(state, event, now)
    state = _alive(state, known, now)
    known = state.agents[name]
    if event.attempt <= known.attempt or known.status is Status.LEAVING:
        return state, ()
    known = replace(known, candidate=event.candidate, attempt=event.attempt)
    if known.status not in (Status.RUNNING, Status.FINISHED) or state.table is None:
        return with_agent(state, replace(known, status=Status.WAITING)), ()
    if event.last_round is None or event.last_round < state.table.round:
        # Its place was lost on the way: it has never started a worker of this round, so it can have it once more.
        return with_agent(state, known), (Resend(name, state.table),)
    # It stopped its own workers without being told, as torch's own agent does after a worker failure.
    state = with_agent(state, replace(known, status=Status.WAITING))
    return transitions.start_forming(state, Reason.WORKER_FAILED, known.candidate.node, now, "joined again by itself")


def _newcomer(state: State, event: Joined, now: float) -> Result:
    candidate = event.candidate
    state = with_agent(state, Agent(candidate, event.attempt, Status.WAITING, last_heard=now))
    state = replace(state, gone_nodes=state.gone_nodes - {candidate.node})
    if state.phase is not Phase.RUNNING or state.table is None:
        return state, ()
    if len(state.table.places) >= state.settings.max_nodes:
        return state, (Spare(candidate.agent, candidate.node),)
    first = now if state.newcomer_first is None else state.newcomer_first
    return replace(state, newcomer_first=first, newcomer_last=now), ()


def _connected(state: State, event: Connected, now: float) -> Result:
    known = state.agents.get(event.agent)
    if state.finish is not None:
        return state, (replace(state.finish, agents=(event.agent,)),)
    if known is not None:
        state = _alive(state, known, now)
    if event.running is None:
        return state, ()
    current = state.table.round if state.phase is Phase.RUNNING and state.table is not None else None
    if known is not None and known.status is not Status.STOPPING and event.running == current:
        return state, ()
    if known is not None and known.status is Status.LEAVING:
        return state, ()
    # It runs workers of a round that is over, and may not have been told.
    node = known.candidate.node if known is not None else ""
    reason = state.reason if known is not None else Reason.NODE_LOST
    return state, (Interrupt((event.agent,), event.running, reason, node, "this round is over"),)


def _disconnected(state: State, event: Disconnected, now: float) -> Result:
    known = state.agents.get(event.agent)
    if known is None or known.departed or state.phase is Phase.CLOSED:
        return state, ()
    state = with_agent(state, replace(known, disconnected_at=now))
    return replace(state, broken=state.broken | {event.agent}), ()


def _heard(state: State, event: Heard, now: float) -> Result:
    agents = dict(state.agents)
    for name, moment in event.signs:
        known = agents.get(name)
        if known is not None and moment > known.last_heard:
            agents[name] = replace(known, last_heard=moment)
    return replace(state, agents=agents), ()


def _ponged(state: State, event: Ponged, now: float) -> Result:
    known = state.agents.get(event.agent)
    if known is None:
        return state, ()
    state = _alive(state, known, now)
    judgement = state.judgement
    if judgement is not None and judgement.probe == event.probe:
        judgement = replace(judgement, unanswered=judgement.unanswered - {event.agent})
        state = replace(state, judgement=judgement)
    return state, ()


def _leaving(state: State, event: Leaving, now: float) -> Result:
    known = state.agents.get(event.agent)
    if known is None or state.phase is Phase.CLOSED or known.status is Status.LEAVING:
        return state, ()
    state = _alive(state, known, now)
    if known.status is Status.WAITING:
        return transitions.retire(state, event.agent, event.reason, now)
    leaving = replace(state.agents[event.agent], status=Status.LEAVING, leave_reason=event.reason)
    state = with_agent(state, leaving)
    if state.phase is Phase.RUNNING:
        return transitions.start_forming(state, Reason.NODE_LEFT, leaving.candidate.node, now, event.reason.value)
    return state, ()


def _left(state: State, event: Left, now: float) -> Result:
    known = state.agents.get(event.agent)
    if known is None or state.phase is Phase.CLOSED:
        return state, ()
    is_member = state.phase is Phase.RUNNING and known.status in (Status.RUNNING, Status.FINISHED)
    if is_member and event.reason is LeaveReason.FINISHED:
        departed = replace(known, status=Status.FINISHED, departed=True, disconnected_at=None)
        state = with_agent(state, departed)
        return replace(state, broken=state.broken - {event.agent}), ()
    return transitions.retire(state, event.agent, event.reason, now)


def _worker_failed(state: State, event: WorkerFailed, now: float) -> Result:
    known = state.agents.get(event.agent)
    if known is None:
        return state, ()
    state = _alive(state, known, now)
    table = state.table
    if state.phase is not Phase.RUNNING or table is None or table.round != event.round:
        return state, ()
    if state.judgement is not None:
        return state, ()
    # A dead node makes the workers of its peers fail: ask everybody before anybody is blamed.
    others = tuple(
        place.agent for place in table.places if place.agent != event.agent and not state.agents[place.agent].departed
    )
    judgement = Judgement(event.failure, now, state.probe + 1, frozenset(others))
    state = replace(state, judgement=judgement, probe=state.probe + 1)
    return state, ((Probe(others, state.probe),) if others else ())


def _finished(state: State, event: Finished, now: float) -> Result:
    known = state.agents.get(event.agent)
    if known is None:
        return state, ()
    state = _alive(state, known, now)
    current = state.phase is Phase.RUNNING and state.table is not None and state.table.round == event.round
    if current and known.status is Status.RUNNING:
        state = with_agent(state, replace(state.agents[event.agent], status=Status.FINISHED))
    return state, ()


def _closed(state: State, event: Closed, now: float) -> Result:
    return transitions.finish(state, Outcome.CLOSED, detail=f"closed by {event.agent}")


def _nodes_seen(state: State, event: NodesSeen, now: float) -> Result:
    present = {agent.candidate.node for agent in state.agents.values()}
    state = replace(state, gone_nodes=state.gone_nodes | (event.down - present))
    silence = state.settings.heartbeat_limit / 3
    down = [
        name
        for name, agent in state.agents.items()
        if agent.candidate.node in event.down and now - agent.last_heard > silence and not agent.departed
    ]
    decisions: tuple[Decision, ...] = ()
    for name in down:
        state, more = transitions.lose(state, name, "Slurm says that its node is down", now)
        decisions += more
    return state, decisions


def _tick(state: State, event: Tick, now: float) -> Result:
    return state, ()


def _alive(state: State, known: Agent, now: float) -> State:
    name = known.candidate.agent
    state = with_agent(state, replace(known, last_heard=now, disconnected_at=None))
    return replace(state, broken=state.broken - {name}) if name in state.broken else state


_HANDLERS: dict[type, Callable[[State, Any, float], Result]] = {
    Closed: _closed,
    Connected: _connected,
    Disconnected: _disconnected,
    Finished: _finished,
    Heard: _heard,
    Joined: _joined,
    Leaving: _leaving,
    Left: _left,
    NodesSeen: _nodes_seen,
    Ponged: _ponged,
    Tick: _tick,
    WorkerFailed: _worker_failed,
}
