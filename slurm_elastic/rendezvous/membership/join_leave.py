"""Agents that come and go: joins, connections, leaves."""

from __future__ import annotations

from slurm_elastic.rendezvous.membership import leader_change, planned_stop, transitions, usable_sizes
from slurm_elastic.rendezvous.membership._persistent import replace
from slurm_elastic.rendezvous.membership.agents import Agent, LeaveReason, Reason, Status
from slurm_elastic.rendezvous.membership.decisions import Decision, Interrupt, Resend, Send, Spare
from slurm_elastic.rendezvous.membership.events import Connected, Disconnected, Joined, Leaving, Left, Returning
from slurm_elastic.rendezvous.membership.messages import Interrupted, Probed, Waiting
from slurm_elastic.rendezvous.membership.state import Phase, Result, State, alive, with_agent


def joined(state: State, event: Joined, now: float) -> Result:
    """An agent wants a place in the next round."""
    name = event.candidate.agent
    if state.finish is not None:
        return state, (replace(state.finish, agents=(name,), everyone=False),)
    if event.restarts > state.restarts:
        # The last leader charged a failure and was lost before it wrote down the round after it.
        state = replace(state, restarts=event.restarts)
    agent = state.agents.get(name)
    if agent is None:
        if event.attempt <= state.gone_agents.get(name, 0):
            return state, ()
        return _newcomer(state, event, now)
    if event.attempt <= agent.attempt or agent.leave_reason is not None:
        return alive(state, agent, now), ()
    state, agent = usable_sizes.learn(state, event, agent)
    asked, table = {"candidate": event.candidate, "attempt": event.attempt}, state.table
    if agent.status not in (Status.RUNNING, Status.FINISHED) or table is None:
        return alive(state, agent, now, **asked, status=Status.WAITING), ()
    if event.last_round is None or event.last_round < table.round:
        # Its place was lost on the way: it has never started a worker of this round, so it can have it once more.
        state = alive(state, agent, now, **asked)
        return state, (Resend(name, table), *planned_stop.request_stop(state, (name,), now))
    # It has stopped its own workers without an interruption.
    state = alive(state, agent, now, **asked, status=Status.WAITING, cut_off=event.cut_off)
    if state.inquest is not None:
        if event.cut_off:
            # The answer of an agent whose workers have stopped.
            unanswered = state.inquest.unanswered - {name}
            state = replace(state, inquest=replace(state.inquest, unanswered=unanswered))
        return state, ()
    if state.planned_stop is not None:
        # As agreed, unless there was no agreement yet.
        return (state, ()) if state.planned_stop.stop is not None else planned_stop.end(state, now)
    node = event.candidate.node
    if event.cut_off:
        return transitions.end_cut_off(state, node, now)
    # Only torch's own agent does so, after a worker failure.
    return transitions.start_forming(state, Reason.WORKER_FAILED, node, now, "its agent restarts them")


def _newcomer(state: State, event: Joined, now: float) -> Result:
    candidate = event.candidate
    if not state.agents and not state.awaited and state.phase is Phase.FORMING:
        # A leader without workers may have waited for hours until Slurm started an agent.
        state = replace(state, forming_since=now)
    state = transitions.note_cohort(state, candidate)
    agent = Agent(candidate, event.attempt, Status.WAITING, last_message_at=now)
    state = with_agent(*usable_sizes.learn(state, event, agent))
    state = replace(
        state,
        gone_nodes=state.gone_nodes - {candidate.node},
        # Slurm was wrong, or early, to say that it had gone.
        gone=state.gone - {candidate.agent},
        lingering=state.lingering - {candidate.agent},
        awaited=state.awaited - {candidate.agent},
    )
    if state.phase is not Phase.RUNNING or state.table is None:
        return state, ()
    if not transitions.makes_larger(state):
        return state, (Spare((candidate.agent,), Waiting(), node=candidate.node),)
    first = now if state.newcomer_first is None else state.newcomer_first
    return replace(state, newcomer_first=first, newcomer_last=now), ()


def connected(state: State, event: Connected, now: float) -> Result:
    """Note that an agent has connected."""
    agent = state.agents.get(event.agent)
    if state.finish is not None:
        return state, (replace(state.finish, agents=(event.agent,), everyone=False),)
    state = (transitions.announce if event.coming else transitions.withdraw)(state, event.agent)
    decisions: tuple[Decision, ...] = ()
    if agent is None and event.agent in state.awaited:
        state = leader_change.expect_join(state, event.agent, now)
        agent = state.agents[event.agent]
    if agent is not None:
        state = alive(state, agent, now)
        if state.inquest is not None and event.agent in state.inquest.unanswered:
            # The question or the answer was lost with the connection before.
            decisions = (Send((event.agent,), Probed(state.inquest.probe, state.inquest.dumps)),)
    if event.running is None:
        return state, decisions
    current = state.table.round if state.phase is Phase.RUNNING and state.table is not None else None
    if agent is not None and agent.status not in (Status.STOPPING, Status.LEAVING) and event.running == current:
        reminder = planned_stop.request_stop(state, (event.agent,), now) if agent.status is Status.RUNNING else ()
        return state, (*decisions, *reminder)
    # It runs workers of a round that is over; the interruption may have been lost.
    node = agent.candidate.node if agent is not None else ""
    reason = state.reason if agent is not None else Reason.NODE_LOST
    if state.round == state.settings.first_round:
        node = state.settings.first_node or node
    over = "this round is over"
    # A leader that resigns has ended its last round.
    resigned = state.settings.first_reason is Reason.NODE_LEFT and event.running < state.settings.first_round
    on_record = event.over or resigned
    interrupted = Interrupted(event.running, reason, node, over, state.restarts)
    return state, (Interrupt((event.agent,), interrupted, on_record=on_record), *decisions)


def disconnected(state: State, event: Disconnected, now: float) -> Result:
    """Note that the connection of an agent is broken."""
    state = transitions.withdraw(state, event.agent)
    agent = state.agents.get(event.agent)
    if agent is None or agent.departed or agent.disconnected_at is not None or state.phase is Phase.CLOSED:
        return state, ()
    state = with_agent(state, replace(agent, disconnected_at=now))
    first = state.first_broken_at if state.broken else now
    return replace(state, broken=state.broken | {event.agent}, first_broken_at=first), ()


def returning(state: State, event: Returning, now: float) -> Result:
    """An agent whose connection broke is on its way with another one, and only waits for its turn.

    It has not proved who it is. So this is no sign of life: it may be silent for as long as any other agent.
    """
    agent = state.agents.get(event.agent)
    if agent is None or event.agent not in state.broken:
        return state, ()
    state = with_agent(state, replace(agent, disconnected_at=None))
    return replace(state, broken=state.broken - {event.agent}), ()


def leaving(state: State, event: Leaving, now: float) -> Result:
    """Note that an agent has announced its leave."""
    state = transitions.withdraw(state, event.agent)
    agent = state.agents.get(event.agent)
    margin = state.settings.leave_margin
    deadline = None if event.seconds is None else now + planned_stop.seconds_to_stop(event.seconds, margin)
    if agent is None or state.phase is Phase.CLOSED:
        # The leader may be none of the agents: it can lead without ever having workers.
        return leader_change.absent_member_leaves(leader_change.leader_goes(state, event, deadline), event), ()
    if agent.leave_reason is not None:
        # It knows more by now.
        again = replace(state.agents[event.agent], leave_reason=event.reason, leave_deadline=deadline)
        return planned_stop.revise(with_agent(state, again), now)
    state = leader_change.leader_goes(alive(state, agent, now), event, deadline)
    if agent.status is Status.WAITING:
        return transitions.retire(state, event.agent, event.reason, now)
    leaving = replace(state.agents[event.agent], leave_reason=event.reason, leave_deadline=deadline)
    if agent.status is Status.FINISHED:
        return with_agent(state, leaving), ()
    if state.phase is not Phase.RUNNING:
        return with_agent(state, replace(leaving, status=Status.LEAVING)), ()
    state = with_agent(state, leaving)
    node, detail = leaving.candidate.node, event.reason.value
    if state.inquest is not None:
        # Its workers may have got the signal before it, so the failure does not count.
        return transitions.start_forming(state, Reason.NODE_LEFT, node, now, detail)
    return planned_stop.request(state, Reason.NODE_LEFT, node, detail, deadline, now)


def left(state: State, event: Left, now: float) -> Result:
    """Let an agent go that has no workers any more."""
    state = transitions.withdraw(state, event.agent)
    if state.base is not None and event.agent in state.base.node_of:
        state = replace(state, ended=state.ended | {event.agent})
    agent = state.agents.get(event.agent)
    if agent is None or agent.departed or state.phase is Phase.CLOSED:
        return leader_change.absent_member_leaves(leader_change.leader_goes(state, event, state.resign_by), event), ()
    state = leader_change.leader_goes(state, event, state.resign_by)
    if event.reason is LeaveReason.FINISHED and state.is_member(agent):
        state = with_agent(state, replace(agent, status=Status.FINISHED))
    elif event.stopped and agent.status is Status.RUNNING and state.planned_stop is not None:
        return planned_stop.member_left(state, event)
    return transitions.retire(state, event.agent, event.reason, now)
