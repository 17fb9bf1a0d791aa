"""Agents that come and go: joins, connections, leaves."""

from __future__ import annotations

from slurm_elastic.rendezvous.membership import leader_change, pending_joins, planned_stop, transitions
from slurm_elastic.rendezvous.membership._replace import replace
from slurm_elastic.rendezvous.membership.agents import Agent, Status
from slurm_elastic.rendezvous.membership.decisions import Decision, Interrupt, Probe, Resend, Spare
from slurm_elastic.rendezvous.membership.events import Connected, Disconnected, Joined, Leaving, Left, Returning
from slurm_elastic.rendezvous.membership.reasons import LeaveReason, Reason
from slurm_elastic.rendezvous.membership.state import Phase, Result, State, alive, with_agent

__all__ = ["connected", "disconnected", "joined", "leaving", "left", "returning"]


def joined(state: State, event: Joined, now: float) -> Result:
    """An agent wants a place in the next round."""
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
    state = alive(state, known, now)
    known = state.agents[name]
    if event.attempt <= known.attempt or known.leave_reason is not None:
        return state, ()
    known = replace(known, candidate=event.candidate, attempt=event.attempt)
    if known.status not in (Status.RUNNING, Status.FINISHED) or state.table is None:
        return with_agent(state, replace(known, status=Status.WAITING)), ()
    if event.last_round is None or event.last_round < state.table.round:
        # Its place was lost on the way: it has never started a worker of this round, so it can have it once more.
        return with_agent(state, known), (Resend(name, state.table), *planned_stop.remind(state, name, now))
    # It stopped its own workers without being told.
    state = with_agent(state, replace(known, status=Status.WAITING))
    if state.inquest is not None:
        return state, ()
    if state.planned_stop is not None:
        # As agreed, unless there was no agreement yet.
        return (state, ()) if state.planned_stop.stop is not None else planned_stop.end(state, now)
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
    state = pending_joins.hear_of(state, candidate)
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
    if not pending_joins.makes_larger(state):
        return state, (Spare(candidate.agent, candidate.node),)
    first = now if state.newcomer_first is None else state.newcomer_first
    return replace(state, newcomer_first=first, newcomer_last=now), ()


def connected(state: State, event: Connected, now: float) -> Result:
    """A connection to an agent stands."""
    known = state.agents.get(event.agent)
    if state.finish is not None:
        return state, (replace(state.finish, agents=(event.agent,)),)
    state = (pending_joins.announce if event.coming else pending_joins.withdraw)(state, event.agent)
    decisions: tuple[Decision, ...] = ()
    if known is None and event.agent in state.awaited:
        state = leader_change.meet(state, event.agent, now)
        known = state.agents[event.agent]
    if known is not None:
        state = alive(state, known, now)
        if state.inquest is not None and event.agent in state.inquest.unanswered:
            # The question or the answer was lost with the connection before.
            decisions = (Probe((event.agent,), state.inquest.probe),)
    if event.running is None:
        return state, decisions
    current = state.table.round if state.phase is Phase.RUNNING and state.table is not None else None
    if known is not None and known.status not in (Status.STOPPING, Status.LEAVING) and event.running == current:
        reminder = planned_stop.remind(state, event.agent, now) if known.status is Status.RUNNING else ()
        return state, (*decisions, *reminder)
    # It runs workers of a round that is over, and may not have been told.
    node = known.candidate.node if known is not None else ""
    reason = state.reason if known is not None else Reason.NODE_LOST
    if state.round == state.settings.first_round:
        node = state.settings.first_node or node
    over = "this round is over"
    # A leader that resigns has ended its last round.
    resigned = state.settings.first_reason is Reason.NODE_LEFT and event.running < state.settings.first_round
    on_record = event.over or resigned
    interrupt = Interrupt(
        (event.agent,), event.running, reason, node, over, restarts=state.restarts, on_record=on_record
    )
    return state, (interrupt, *decisions)


def disconnected(state: State, event: Disconnected, now: float) -> Result:
    """The connection to an agent broke."""
    state = pending_joins.withdraw(state, event.agent)
    known = state.agents.get(event.agent)
    if known is None or known.departed or known.disconnected_at is not None or state.phase is Phase.CLOSED:
        return state, ()
    state = with_agent(state, replace(known, disconnected_at=now))
    return replace(state, broken=state.broken | {event.agent}), ()


def returning(state: State, event: Returning, now: float) -> Result:
    """An agent whose connection broke is on its way with another one, and only waits for its turn.

    It has not proved who it is. So this is no sign of life: it may be silent for as long as any other agent.
    """
    known = state.agents.get(event.agent)
    if known is None or event.agent not in state.broken:
        return state, ()
    state = with_agent(state, replace(known, disconnected_at=None))
    return replace(state, broken=state.broken - {event.agent}), ()


def leaving(state: State, event: Leaving, now: float) -> Result:
    """An agent announces that it goes."""
    state = pending_joins.withdraw(state, event.agent)
    known = state.agents.get(event.agent)
    margin = state.settings.leave_margin
    deadline = None if event.seconds is None else now + planned_stop.seconds_to_stop(event.seconds, margin)
    if known is None or state.phase is Phase.CLOSED:
        # The leader may be none of the agents: it can lead without ever having workers.
        return leader_change.farewell(leader_change.leader_goes(state, event, deadline), event), ()
    if known.leave_reason is not None:
        # It knows more by now.
        again = replace(state.agents[event.agent], leave_reason=event.reason, leave_deadline=deadline)
        return planned_stop.revise(with_agent(state, again), now)
    state = leader_change.leader_goes(alive(state, known, now), event, deadline)
    if known.status is Status.WAITING:
        return transitions.retire(state, event.agent, event.reason, now)
    leaving = replace(state.agents[event.agent], leave_reason=event.reason, leave_deadline=deadline)
    if known.status is Status.FINISHED:
        return with_agent(state, leaving), ()
    if state.phase is not Phase.RUNNING:
        return with_agent(state, replace(leaving, status=Status.LEAVING)), ()
    state = with_agent(state, leaving)
    node, detail = leaving.candidate.node, event.reason.value
    if state.inquest is not None:
        # Its workers may have been told to go before it was, and the failure is of no more interest.
        return transitions.start_forming(state, Reason.NODE_LEFT, node, now, detail)
    return planned_stop.wind(state, Reason.NODE_LEFT, node, detail, deadline, now)


def left(state: State, event: Left, now: float) -> Result:
    """An agent says farewell."""
    state = pending_joins.withdraw(state, event.agent)
    if state.base is not None and event.agent in state.base.node_of:
        state = replace(state, ended=state.ended | {event.agent})
    known = state.agents.get(event.agent)
    if known is None or known.departed or state.phase is Phase.CLOSED:
        return leader_change.farewell(leader_change.leader_goes(state, event, state.resign_by), event), ()
    state = leader_change.leader_goes(state, event, state.resign_by)
    if event.reason is LeaveReason.FINISHED and state.is_member(known):
        state = with_agent(state, replace(known, status=Status.FINISHED))
    elif event.stopped and known.status is Status.RUNNING and state.planned_stop is not None:
        return planned_stop.farewell(state, event)
    return transitions.retire(state, event.agent, event.reason, now)
