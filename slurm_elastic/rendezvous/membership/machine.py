"""The membership machine: one event in, the next state and the decisions out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from slurm_elastic.rendezvous.membership import arrivals, succession, transitions, winding
from slurm_elastic.rendezvous.membership.agents import Agent, Status
from slurm_elastic.rendezvous.membership.changes import replace
from slurm_elastic.rendezvous.membership.conditions import advance
from slurm_elastic.rendezvous.membership.decisions import Decision, Interrupt, Outcome, Probe, Resend, Spare
from slurm_elastic.rendezvous.membership.events import (
    Claimed,
    Closed,
    Connected,
    Disconnected,
    Event,
    Finished,
    Gone,
    Heard,
    Held,
    Joined,
    Leaving,
    Left,
    NodesSeen,
    Ponged,
    Tick,
    WorkerFailed,
)
from slurm_elastic.rendezvous.membership.reasons import LeaveReason, Reason
from slurm_elastic.rendezvous.membership.state import Judgement, Phase, State, with_agent

__all__ = ["step"]

Result = tuple[State, tuple[Decision, ...]]

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
    """A leader that was stopped for a while has heard nobody: that is its own silence, not theirs.

    What was said meanwhile may still lie unread in the sockets, so no deadline comes nearer by such a gap.
    """
    gap = now - state.seen_until
    if gap <= state.settings.tick_interval * (3 if state.calm else 2):
        return replace(state, seen_until=now)

    def later(moment: float | None) -> float | None:
        return None if moment is None else moment + gap

    # Who was overdue already, and only waited for a tick, may have been heard of meanwhile as well.
    latest = now - state.settings.heartbeat_limit

    judgement, winding_down = state.judgement, state.winding
    return replace(
        state,
        agents={
            name: replace(
                agent, last_heard=max(agent.last_heard + gap, latest), disconnected_at=later(agent.disconnected_at)
            )
            for name, agent in state.agents.items()
        },
        judgement=None if judgement is None else replace(judgement, since=judgement.since + gap),
        forming_since=state.forming_since + gap,
        complete_since=later(state.complete_since),
        newcomer_first=later(state.newcomer_first),
        newcomer_last=later(state.newcomer_last),
        # Not its deadline: whoever sends a departing agent away does not wait either.
        winding=None if winding_down is None else replace(winding_down, since=winding_down.since + gap),
        seen_until=now,
    )


def _joined(state: State, event: Joined, now: float) -> Result:
    name = event.candidate.agent
    if state.finish is not None:
        return state, (replace(state.finish, agents=(name,)),)
    if event.restarts > state.restarts:
        # The last leader charged a failure and was lost before it wrote down the round after it.
        state = replace(state, restarts=event.restarts)
    known = state.agents.get(name)
    if known is None:
        if event.attempt <= state.gone_agents.get(name, 0):
            return state, ()
        return _newcomer(state, event, now)
    state = _alive(state, known, now)
    known = state.agents[name]
    if event.attempt <= known.attempt or known.leave_reason is not None:
        return state, ()
    known = replace(known, candidate=event.candidate, attempt=event.attempt)
    if known.status not in (Status.RUNNING, Status.FINISHED) or state.table is None:
        return with_agent(state, replace(known, status=Status.WAITING)), ()
    if event.last_round is None or event.last_round < state.table.round:
        # Its place was lost on the way: it has never started a worker of this round, so it can have it once more.
        return with_agent(state, known), (Resend(name, state.table), *winding.remind(state, name, now))
    # It stopped its own workers without being told.
    state = with_agent(state, replace(known, status=Status.WAITING))
    if state.judgement is not None:
        return state, ()
    if state.winding is not None:
        # As agreed, unless there was no agreement yet.
        return (state, ()) if state.winding.stop is not None else winding.end(state, now)
    node = known.candidate.node
    if event.cut_off:
        # It was out of touch for so long that it had to expect to be given up, and not for so long that it was.
        detail = "it did not hear the leader, stopped its workers and is back"
        return transitions.start_forming(state, Reason.NODE_LOST, node, now, detail)
    # As torch's own agent does after a worker failure, and nobody else does.
    return transitions.start_forming(state, Reason.WORKER_FAILED, node, now, "its agent restarts them")


def _newcomer(state: State, event: Joined, now: float) -> Result:
    candidate = event.candidate
    if not state.agents and not state.awaited and state.phase is Phase.FORMING:
        # A leader without workers may have waited for hours until Slurm started somebody.
        state = replace(state, forming_since=now)
    state = arrivals.hear_of(state, candidate)
    state = with_agent(state, Agent(candidate, event.attempt, Status.WAITING, last_heard=now))
    state = replace(
        state,
        gone_nodes=state.gone_nodes - {candidate.node},
        # Slurm's word that it had gone was wrong, or came too soon.
        gone=state.gone - {candidate.agent},
        lingering=state.lingering - {candidate.agent},
        awaited=state.awaited - {candidate.agent},
    )
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
    state = (arrivals.announce if event.coming else arrivals.withdraw)(state, event.agent)
    decisions: tuple[Decision, ...] = ()
    if known is None and event.agent in state.awaited:
        state = succession.meet(state, event.agent, now)
        known = state.agents[event.agent]
    if known is not None:
        state = _alive(state, known, now)
        if state.judgement is not None and event.agent in state.judgement.unanswered:
            # The question or the answer was lost with the connection before.
            decisions = (Probe((event.agent,), state.judgement.probe),)
    if event.running is None:
        return state, decisions
    current = state.table.round if state.phase is Phase.RUNNING and state.table is not None else None
    if known is not None and known.status not in (Status.STOPPING, Status.LEAVING) and event.running == current:
        reminder = winding.remind(state, event.agent, now) if known.status is Status.RUNNING else ()
        return state, (*decisions, *reminder)
    # It runs workers of a round that is over, and may not have been told.
    node = known.candidate.node if known is not None else ""
    reason = state.reason if known is not None else Reason.NODE_LOST
    if state.round == state.settings.first_round:
        node = state.settings.first_node or node
    over = "this round is over"
    interrupt = Interrupt((event.agent,), event.running, reason, node, over, restarts=state.restarts)
    return state, (interrupt, *decisions)


def _disconnected(state: State, event: Disconnected, now: float) -> Result:
    state = arrivals.withdraw(state, event.agent)
    known = state.agents.get(event.agent)
    if known is None or known.departed or known.disconnected_at is not None or state.phase is Phase.CLOSED:
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
        told = (*judgement.slowest, event.slowest) if event.slowest is not None else judgement.slowest
        first = event.agent in judgement.unanswered
        unanswered = judgement.unanswered - {event.agent}
        judgement = replace(judgement, unanswered=unanswered, slowest=told if first else judgement.slowest)
        state = replace(state, judgement=judgement)
    return state, ()


def _leaving(state: State, event: Leaving, now: float) -> Result:
    state = arrivals.withdraw(state, event.agent)
    known = state.agents.get(event.agent)
    margin = state.settings.leave_margin
    deadline = None if event.seconds is None else now + winding.seconds_to_stop(event.seconds, margin)
    if known is None or state.phase is Phase.CLOSED:
        # The leader may be none of the agents: it can lead without ever having workers.
        return succession.farewell(succession.leader_goes(state, event, deadline), event), ()
    if known.leave_reason is not None:
        # It knows more by now.
        again = replace(state.agents[event.agent], leave_reason=event.reason, leave_deadline=deadline)
        return winding.revise(with_agent(state, again), now)
    state = succession.leader_goes(_alive(state, known, now), event, deadline)
    if known.status is Status.WAITING:
        return transitions.retire(state, event.agent, event.reason, now)
    leaving = replace(state.agents[event.agent], leave_reason=event.reason, leave_deadline=deadline)
    if known.status is Status.FINISHED:
        return with_agent(state, leaving), ()
    if state.phase is not Phase.RUNNING:
        return with_agent(state, replace(leaving, status=Status.LEAVING)), ()
    state = with_agent(state, leaving)
    node, detail = leaving.candidate.node, event.reason.value
    if state.judgement is not None:
        # Its workers may have been told to go before it was, and the failure is of no more interest.
        return transitions.start_forming(state, Reason.NODE_LEFT, node, now, detail)
    return winding.wind(state, Reason.NODE_LEFT, node, detail, deadline, now)


def _left(state: State, event: Left, now: float) -> Result:
    state = arrivals.withdraw(state, event.agent)
    if state.base is not None and event.agent in state.base.members:
        state = replace(state, ended=state.ended | {event.agent})
    known = state.agents.get(event.agent)
    if known is None or known.departed or state.phase is Phase.CLOSED:
        return succession.farewell(succession.leader_goes(state, event, state.resign_by), event), ()
    state = succession.leader_goes(state, event, state.resign_by)
    if event.reason is LeaveReason.FINISHED and state.is_member(known):
        state = with_agent(state, replace(known, status=Status.FINISHED))
    elif event.stopped and known.status is Status.RUNNING and state.winding is not None:
        return winding.farewell(state, event)
    return transitions.retire(state, event.agent, event.reason, now)


def _worker_failed(state: State, event: WorkerFailed, now: float) -> Result:
    known = state.agents.get(event.agent)
    if known is None:
        return state, ()
    state = _alive(state, known, now)
    table = state.table
    if table is None or table.round != event.round or not state.is_member(known):
        return state, ()
    if (judgement := state.judgement) is not None:
        if event.failure.hung and not judgement.failure.hung:
            # Its end by the watchdog is what made the other one fail, whoever told first.
            state = replace(state, judgement=replace(judgement, failure=event.failure))
        return state, ()
    # A dead node makes the workers of its peers fail: ask everybody before anybody is blamed. The one that told is
    # asked too, as its own node may be dying.
    asked = tuple(
        place.agent
        for place in table.places
        if (member := state.agents.get(place.agent)) is not None and not member.departed
    )
    judgement = Judgement(event.failure, now, state.probe + 1, frozenset(asked))
    return replace(state, judgement=judgement, probe=state.probe + 1), (Probe(asked, judgement.probe),)


def _finished(state: State, event: Finished, now: float) -> Result:
    known = state.agents.get(event.agent)
    if known is None:
        return state, ()
    state = _alive(state, known, now)
    if state.is_member(known) and known.round == event.round and known.status is Status.RUNNING:
        state = with_agent(state, replace(state.agents[event.agent], status=Status.FINISHED))
    return state, ()


def _closed(state: State, event: Closed, now: float) -> Result:
    return transitions.finish(state, Outcome.CLOSED, detail=f"closed by {event.agent}")


def _claimed(state: State, event: Claimed, now: float) -> Result:
    return replace(state, claimed=True), ()


def _nodes_seen(state: State, event: NodesSeen, now: float) -> Result:
    present = {agent.candidate.node for agent in state.agents.values()}
    state = replace(state, gone_nodes=state.gone_nodes | (event.down - present))
    # Slurm also calls a node down whose slurmd alone has died. Signs of life come three times in a limit, and are
    # taken in before this, or with a tick.
    silence = state.settings.heartbeat_limit * 2 / 3
    down = [
        name
        for name, agent in state.agents.items()
        if agent.candidate.node in event.down and now - agent.last_heard > silence and not agent.departed
    ]
    decisions: tuple[Decision, ...] = ()
    for name in down:
        state, more = transitions.lose(state, name, "Slurm says that its node is down", now)
        decisions += more
    return succession.nodes_down(state, event.down), decisions


def _held(state: State, event: Held, now: float) -> Result:
    known = state.agents.get(event.agent)
    return winding.answer(_alive(state, known, now), event, now) if known is not None else (state, ())


def _tick(state: State, event: Tick, now: float) -> Result:
    overdue = now - state.settings.heartbeat_limit
    if state.calm and any(agent.last_heard < overdue for agent in state.agents.values()):
        # Nobody was missed at the last look, so it was the leader that was away; whoever lives is heard by the next.
        agents = {
            name: replace(agent, last_heard=max(agent.last_heard, overdue)) for name, agent in state.agents.items()
        }
        state = replace(state, agents=agents)
    missed = now - state.settings.heartbeat_limit / 2
    # The signs of very many come in turns.
    calm = len(state.agents) <= _FEW and all(agent.last_heard >= missed for agent in state.agents.values())
    return replace(state, ticked_at=now, calm=calm), ()


def _alive(state: State, known: Agent, now: float) -> State:
    name = known.candidate.agent
    state = with_agent(state, replace(known, last_heard=now, disconnected_at=None, departed=False))
    return replace(state, broken=state.broken - {name}) if name in state.broken else state


_HANDLERS: dict[type, Callable[[State, Any, float], Result]] = {
    Claimed: _claimed,
    Closed: _closed,
    Connected: _connected,
    Disconnected: _disconnected,
    Finished: _finished,
    Gone: succession.gone,
    Heard: _heard,
    Held: _held,
    Joined: _joined,
    Leaving: _leaving,
    Left: _left,
    NodesSeen: _nodes_seen,
    Ponged: _ponged,
    Tick: _tick,
    WorkerFailed: _worker_failed,
}
