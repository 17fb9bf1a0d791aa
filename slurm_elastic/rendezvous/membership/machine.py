"""The membership machine: one event in, the next state and the decisions out.

The handlers of events are here; what they share with each other is in :mod:`.transitions`, and what follows from the
state after each of them in :mod:`.advance`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from slurm_elastic.rendezvous.membership import events, leader_change, planned_stop, transitions
from slurm_elastic.rendezvous.membership.advance import advance, next_deadline
from slurm_elastic.rendezvous.membership.agents import Agent, LeaveReason, Reason, Status, node_of, root_of
from slurm_elastic.rendezvous.membership.persistent import NamedMap, replace
from slurm_elastic.rendezvous.membership.state import FailureInquest, Phase, Result, State, alive, answered, with_agent

Handler = Callable[[State, Any, float], Result]

_FEW = 64
"""Agents that are asked for signs of life all together."""


def step(state: State, event: events.Event, now: float) -> Result:
    """Process one event at this moment, not before that of the last one; return the next state, and the decisions."""
    state = _forgive_own_pause(state, now)
    state, decisions = _HANDLERS[type(event)](state, event, now)
    state, consequences = advance(state, now, ticked=isinstance(event, events.Tick))
    return state, decisions + consequences


def _forgive_own_pause(state: State, now: float) -> State:
    """Extend all time limits if the leader itself was paused: it has received nothing meanwhile.

    Messages may still lie unread in the sockets, so no deadline comes nearer by such a gap.
    """
    gap = now - state.seen_until
    # What explains a failure may come from the agent of the leader's own node, which was paused with it.
    late = state.inquest is not None and now > next_deadline(state) + state.settings.settle_time / 2
    if gap <= state.heartbeat_limit / (2 if state.calm else 3) and not late:
        return replace(state, seen_until=now)

    def later(moment: float) -> float:
        # Rounded, a sum may be later than now.
        return min(moment + gap, now)

    # A message of an agent that was overdue already, and only waited for a tick, may have arrived meanwhile, too.
    latest = now - state.heartbeat_limit

    inquest, stop_planned = state.inquest, state.planned_stop
    return replace(
        state,
        agents=NamedMap(
            (name, replace(agent, last_message_at=max(agent.last_message_at + gap, latest)))
            for name, agent in state.agents.items()
        ),
        broken=NamedMap((name, later(moment)) for name, moment in state.broken.items()),
        first_broken_at=later(state.first_broken_at),
        inquest=None if inquest is None else replace(inquest, since=inquest.since + gap),
        forming_since=state.forming_since + gap,
        complete_since=None if state.complete_since is None else later(state.complete_since),
        newcomers=None if state.newcomers is None else (state.newcomers[0] + gap, state.newcomers[1] + gap),
        # Not its deadline: what ends a departing agent does not wait either.
        planned_stop=None if stop_planned is None else replace(stop_planned, since=stop_planned.since + gap),
        seen_until=now,
    )


def _joined(state: State, event: events.Joined, now: float) -> Result:
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
    state, agent = transitions.learn(state, event, agent)
    asked, table = {"candidate": event.candidate, "attempt": event.attempt}, state.table
    if agent.status not in (Status.RUNNING, Status.FINISHED) or table is None:
        return alive(state, agent, now, **asked, status=Status.WAITING), ()
    if event.last_round is None or event.last_round < table.round:
        # Its place was lost on the way: it has never started a worker of this round, so it can have it once more.
        state = alive(state, agent, now, **asked)
        return state, (events.Resend(name, table), *planned_stop.request_stop(state, (name,), now))
    # It has stopped its own workers without an interruption.
    state = alive(state, agent, now, **asked, status=Status.WAITING, cut_off=event.cut_off)
    if state.inquest is not None:
        # The answer of an agent whose workers have stopped.
        return answered(state, name) if event.cut_off else state, ()
    if state.planned_stop is not None:
        # As agreed, unless there was no agreement yet.
        return (state, ()) if state.planned_stop.stop is not None else planned_stop.end(state, now)
    node = event.candidate.node
    if event.cut_off:
        return transitions.end_cut_off(state, node, now)
    # Only torch's own agent does so, after a worker failure.
    return transitions.start_forming(state, Reason.WORKER_FAILED, node, now, "its agent restarts them")


def _newcomer(state: State, event: events.Joined, now: float) -> Result:
    candidate = event.candidate
    if not state.agents and not state.awaited and state.phase is Phase.FORMING:
        # A leader without workers may have waited for hours until Slurm started an agent.
        state = replace(state, forming_since=now)
    state = transitions.note_cohort(state, candidate)
    agent = Agent(candidate, event.attempt, Status.WAITING, last_message_at=now)
    state = with_agent(*transitions.learn(state, event, agent))
    state = replace(
        state,
        gone_nodes=state.gone_nodes - {candidate.node},
        # Slurm was wrong, or early, to say that it had gone.
        gone=state.gone - {candidate.agent},
        lingering=state.lingering - {candidate.agent},
        awaited=state.awaited.without(candidate.agent),
    )
    if state.phase is not Phase.RUNNING:
        return state, ()
    if not transitions.makes_larger(state):
        return state, (events.Send((candidate.agent,), events.Waiting()),)
    first = now if state.newcomers is None else state.newcomers[0]
    return replace(state, newcomers=(first, now)), ()


def _connected(state: State, event: events.Connected, now: float) -> Result:
    """Note that an agent has connected."""
    agent = state.agents.get(event.agent)
    if state.finish is not None:
        return state, (replace(state.finish, agents=(event.agent,), everyone=False),)
    state = (transitions.announce if event.coming else transitions.withdraw)(state, event.agent)
    decisions: tuple[events.Decision, ...] = ()
    if agent is None and event.agent in state.awaited:
        state = leader_change.expect_join(state, event.agent, now)
        agent = state.agents[event.agent]
    if agent is not None:
        state = alive(state, agent, now)
        if state.inquest is not None and event.agent in state.inquest.unanswered:
            # The question or the answer was lost with the connection before.
            decisions = (events.Send((event.agent,), events.Probed(state.probe, state.inquest.dumps)),)
    if event.running is None:
        return state, decisions
    current = state.round if state.phase is Phase.RUNNING else None
    if agent is not None and agent.status is not Status.STOPPING and event.running == current:
        reminder = planned_stop.request_stop(state, (event.agent,), now) if agent.status is Status.RUNNING else ()
        return state, (*decisions, *reminder)
    # It runs workers of a round that is over; the interruption may have been lost.
    node = agent.candidate.node if agent is not None else ""
    reason = state.reason if agent is not None else Reason.NODE_LOST
    followed = state.settings.base
    if state.round == state.settings.first_round and followed is not None:
        node = node_of(followed.leader)
    over = "this round is over"
    # A leader that resigns has ended its last round.
    resigned = state.settings.first_reason is Reason.NODE_LEFT and event.running < state.settings.first_round
    on_record = event.over or resigned
    interrupted = events.Interrupted(event.running, reason, node, over, state.restarts)
    return state, (events.Interrupt((event.agent,), interrupted, on_record=on_record), *decisions)


def _disconnected(state: State, event: events.Disconnected, now: float) -> Result:
    """Note that the connection of an agent is broken."""
    state = transitions.withdraw(state, event.agent)
    agent = state.agents.get(event.agent)
    if agent is None or agent.departed or event.agent in state.broken or state.phase is Phase.CLOSED:
        return state, ()
    first = state.first_broken_at if state.broken else now
    return replace(state, broken=state.broken.set(event.agent, now), first_broken_at=first), ()


def _returning(state: State, event: events.Returning, now: float) -> Result:
    """An agent whose connection broke is on its way with another one, and only waits for its turn.

    It has not proved who it is. So this is no sign of life: it may be silent for as long as any other agent.
    """
    return replace(state, broken=state.broken.without(event.agent)), ()


def _leaving(state: State, event: events.Leaving, now: float) -> Result:
    """Note that an agent has announced its leave."""
    state = transitions.withdraw(state, event.agent)
    agent = state.agents.get(event.agent)
    deadline = math.inf
    if event.seconds is not None:
        deadline = now + planned_stop.seconds_to_stop(event.seconds, state.settings.leave_margin)
    # The leader may be none of the agents: it can lead without ever having workers.
    state = leader_change.leader_goes(state, event, deadline)
    if agent is None or state.phase is Phase.CLOSED:
        return leader_change.absent_member_leaves(state, event), ()
    state = alive(state, agent, now, leave_reason=event.reason, leave_deadline=deadline)
    if agent.leave_reason is not None:
        # It knows more by now.
        return planned_stop.revise(state, now)
    if agent.status is Status.WAITING:
        return transitions.retire(state, event.agent, event.reason, now)
    if agent.status is not Status.RUNNING:
        return state, ()
    node, detail = agent.candidate.node, event.reason.value
    if state.inquest is not None:
        # Its workers may have got the signal before it, so the failure does not count.
        return transitions.start_forming(state, Reason.NODE_LEFT, node, now, detail)
    return planned_stop.request(state, Reason.NODE_LEFT, node, detail, deadline, now)


def _left(state: State, event: events.Left, now: float) -> Result:
    """Let an agent go that has no workers any more."""
    state = transitions.withdraw(state, event.agent)
    if state.base is not None and event.agent in state.base.node_of:
        state = replace(state, ended=state.ended | {event.agent})
    agent = state.agents.get(event.agent)
    state = leader_change.leader_goes(state, event, state.resign_by)
    if agent is None or agent.departed or state.phase is Phase.CLOSED:
        return leader_change.absent_member_leaves(state, event), ()
    if event.reason is LeaveReason.FINISHED and state.is_member(agent):
        state = with_agent(state, replace(agent, status=Status.FINISHED))
    elif event.stopped and agent.status is Status.RUNNING and state.planned_stop is not None:
        return planned_stop.member_left(state, event)
    return transitions.retire(state, event.agent, event.reason, now)


def _signs_of_life(state: State, event: events.SignsOfLife, now: float) -> Result:
    updated = {}
    for name, moment in event.signs:
        agent = state.agents.get(name)
        if agent is not None and moment > agent.last_message_at:
            updated[name] = replace(agent, last_message_at=moment)
    return (replace(state, agents=state.agents.update(updated)) if updated else state), ()


def _of_known(handler: Handler) -> Handler:
    """Return a handler that takes the message of a known agent, as a sign of life too, and drops any other one."""

    def handle(state: State, event: Any, now: float) -> Result:
        agent = state.agents.get(event.agent)
        return (state, ()) if agent is None else handler(alive(state, agent, now), event, now)

    return handle


def _ponged(state: State, event: events.Ponged, now: float) -> Result:
    inquest = state.inquest
    if inquest is not None and state.probe == event.probe and event.agent in inquest.unanswered:
        state = replace(state, inquest=replace(inquest, positions=(*inquest.positions, *event.positions)))
        state = answered(state, event.agent)
    return state, ()


def _worker_failed(state: State, event: events.WorkerFailed, now: float) -> Result:
    if event.round != state.round or not state.is_member(state.agents[event.agent]):
        return state, ()
    inquest = state.inquest
    asks = inquest is None or (event.failure.stalled and not inquest.dumps)
    if inquest is None:
        # A dead node makes the workers of its peers fail: all members are probed before a worker is charged. The one
        # that reports it is probed, too, as its own node may be dying.
        state = replace(state, probe=state.probe + 1)
        inquest = FailureInquest(event.failure, now, NamedMap(dict.fromkeys(_members(state))))
    inquest = replace(
        inquest,
        failure=root_of((inquest.failure, event.failure)),
        dumps=inquest.dumps or event.failure.stalled,
        failed=inquest.failed | {event.agent},
        roots=inquest.roots if event.failure.consequence else inquest.roots | {event.agent},
    )
    # Again also to members that have answered a probe that asked for no dumps.
    decisions = (events.Send(_members(state), events.Probed(state.probe, inquest.dumps)),) if asks else ()
    return replace(state, inquest=inquest), decisions


def _members(state: State) -> tuple[str, ...]:
    """Return the members of the round that have not departed."""
    return tuple(
        place.agent
        for place in state.places
        if (member := state.agents.get(place.agent)) is not None and not member.departed
    )


def _finished(state: State, event: events.Finished, now: float) -> Result:
    agent = state.agents[event.agent]
    if state.is_member(agent) and agent.round == event.round and agent.status is Status.RUNNING:
        state = with_agent(state, replace(agent, status=Status.FINISHED))
    return state, ()


def _closed(state: State, event: events.Closed, now: float) -> Result:
    return transitions.finish(state, events.Outcome.CLOSED, detail=f"closed by {event.agent}")


def _claimed(state: State, event: events.Claimed, now: float) -> Result:
    return replace(state, claimed=True), ()


def _nodes_down(state: State, event: events.NodesDown, now: float) -> Result:
    state = replace(state, gone_nodes=state.gone_nodes | (event.down - state.on_node.keys()))
    # Slurm also calls a node down whose slurmd alone has died. Signs of life come three times in a limit, and are
    # taken in before this, or with a tick.
    silence = state.heartbeat_limit * 2 / 3
    down = [
        name
        for name, agent in state.agents.items()
        if agent.candidate.node in event.down and now - agent.last_message_at > silence and not agent.departed
    ]
    state, decisions = transitions.give_up_all(state, dict.fromkeys(down, "Slurm says that its node is down"), now)
    return leader_change.nodes_down(state, event.down), decisions


def _tick(state: State, event: events.Tick, now: float) -> Result:
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


_HANDLERS: dict[type, Handler] = {
    events.Claimed: _claimed,
    events.Closed: _closed,
    events.Connected: _connected,
    events.Disconnected: _disconnected,
    events.Finished: _of_known(_finished),
    events.Gone: leader_change.gone,
    events.SignsOfLife: _signs_of_life,
    events.Held: _of_known(planned_stop.answer),
    events.Joined: _joined,
    events.Leaving: _leaving,
    events.Left: _left,
    events.NodesDown: _nodes_down,
    events.Ponged: _of_known(_ponged),
    events.Returning: _returning,
    events.Tick: _tick,
    events.WorkerFailed: _of_known(_worker_failed),
}
