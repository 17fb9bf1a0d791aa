"""The planned end of a round: all workers stop at one step, so that none is lost.

The members are asked for the earliest step at which their workers can stop; the latest of the answers is the step at
which all of them do. The round keeps running until every member has stopped. A member that takes no part, or does not
keep to it, makes it an ordinary interruption.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from slurm_elastic.rendezvous.membership import transitions
from slurm_elastic.rendezvous.membership.agents import LeaveReason, Reason, Status
from slurm_elastic.rendezvous.membership.events import Decision, Held, Holding, Left, Retire, Send, Stopping
from slurm_elastic.rendezvous.membership.persistent import replace
from slurm_elastic.rendezvous.membership.state import PlannedStop, Result, State, without_agent

_MUCH_EARLIER = 1.0
"""Seconds by which a deadline has to come nearer before the stop step is sent again. The agents of one
job leave one after the other with the same deadline, which changes nothing."""


def seconds_to_stop(seconds: float, margin: float) -> float:
    """Return how long workers may run on towards an agreed step when their agent has to be gone in `seconds`.

    Args:
        seconds: left until then; negative if it is past.
        margin: seconds for stopping them by force, if it comes to that. Of a short time it takes at most half.
    """
    return max(0.0, seconds - margin, seconds / 2)


def request(state: State, reason: Reason, node: str, detail: str, deadline: float, now: float) -> Result:
    """Ask the members of a running round for a step to stop at; if they are asked already, one more of them leaves.

    No worker failure is being judged. At the deadline members that still run are interrupted.
    """
    planned = state.planned_stop
    if planned is None:
        state = replace(state, planned_stop=PlannedStop(reason, node, detail, since=now, deadline=deadline))
        return state, request_stop(state, tuple(_running(state)), now)
    if planned.reason is reason:
        node, detail = f"{planned.node}, {node}", _together([*planned.detail.split(", "), detail])
    deadline = min(planned.deadline, deadline)
    return _revised(state, planned, replace(planned, reason=reason, node=node, detail=detail, deadline=deadline), now)


def revise(state: State, now: float) -> Result:
    """Take note of a new reason or deadline of a member that leaves: the newest counts, even if it is later."""
    planned = state.planned_stop
    if planned is None:
        return state, ()
    members = [state.agents[place.agent] for place in state.places if place.agent in state.agents]
    leaving = [agent for agent in members if agent.leave_reason is not None]
    deadline = min((agent.leave_deadline for agent in leaving), default=math.inf)
    detail = planned.detail
    if planned.reason is Reason.NODE_LEFT:
        detail = _together(agent.leave_reason.value for agent in leaving if agent.leave_reason is not None)
    return _revised(state, planned, replace(planned, deadline=deadline, detail=detail), now)


def _revised(state: State, planned: PlannedStop, revised: PlannedStop, now: float) -> Result:
    state = replace(state, planned_stop=revised)
    if planned.stop is None or math.isclose(revised.deadline, planned.deadline, rel_tol=0.0, abs_tol=_MUCH_EARLIER):
        return state, ()
    return state, request_stop(state, tuple(_running(state)), now)


def answer(state: State, event: Held, now: float) -> Result:
    """Note from which step on the workers of a member can stop; None from a member that does not, or no more."""
    agent, planned = state.agents[event.agent], state.planned_stop
    if planned is None or event.round != state.round:
        return state, ()
    if agent.status is not Status.RUNNING or not state.is_member(agent):
        return state, ()
    if event.step is None:
        return (state, ()) if _inquest_first(state, planned) else end(state, now)
    if planned.stop is not None:
        return state, ()
    answers = planned.answers.set(event.agent, event.step)
    return replace(state, planned_stop=replace(planned, answers=answers)), ()


def member_left(state: State, event: Left) -> Result:
    """Let a member go whose workers have stopped at the agreed step: the others run on to it."""
    planned = state.planned_stop
    assert planned is not None
    node = state.agents[event.agent].candidate.node
    state = replace(
        without_agent(state, event.agent),
        planned_stop=replace(planned, gone=(*planned.gone, event.agent)),
        gone=state.gone | {event.agent},
    )
    return state, (Retire(event.agent, node, event.reason),)


def request_stop(state: State, agents: tuple[str, ...], now: float) -> tuple[Decision, ...]:
    """Ask these agents for a step, or send them the stop step once it is known."""
    planned = state.planned_stop
    if planned is None:
        return ()
    leaving = tuple(name for name, agent in state.agents.items() if agent.leave_reason is not None)
    if planned.stop is None:
        return (Send(agents, Holding(state.round, leaving)),)
    seconds = None if planned.deadline == math.inf else max(0.0, planned.deadline - now)
    reason, node, detail = planned.reason, planned.node, planned.detail
    return (Send(agents, Stopping(state.round, planned.stop, reason, node, detail, seconds, leaving)),)


def advance(state: State, now: float) -> Result:
    """Agree on the step when all have answered, and end the round when all have stopped."""
    planned = state.planned_stop
    if planned is None or state.inquest is not None:
        return state, ()
    if not state.running:
        return end(state, now)
    if planned.stop is not None or len(planned.answers) < state.running:
        return state, ()
    if not all(name in planned.answers for name in _running(state)):
        return state, ()
    state = replace(state, planned_stop=replace(planned, stop=max(planned.answers.values())))
    return state, request_stop(state, tuple(_running(state)), now)


def due(state: State) -> float:
    """Return when the members that still run are interrupted; infinity without a time limit."""
    planned = state.planned_stop
    if planned is None or _inquest_first(state, planned):
        return math.inf
    # Workers stand still from their answer on until all have answered, so a missing one is not waited for long.
    unanswered = planned.since + state.heartbeat_limit if planned.stop is None else math.inf
    return min(planned.deadline, unanswered)


def end(state: State, now: float) -> Result:
    """End the round, interrupting those that still run."""
    planned = state.planned_stop
    assert planned is not None
    stop = None if state.running else planned.stop
    node = newcomers(state) or planned.node if planned.reason is Reason.NODE_JOINED else planned.node
    return transitions.start_forming(state, planned.reason, node, now, planned.detail, step=stop)


def newcomers(state: State) -> str:
    """The nodes of all agents that have no place in the round that runs, in the order of ranks."""
    candidates = sorted(
        (agent.candidate for agent in state.agents.values() if not state.is_member(agent)),
        key=lambda candidate: candidate.order,
    )
    return ", ".join(candidate.node for candidate in candidates)


def _inquest_first(state: State, planned: PlannedStop) -> bool:
    """Return whether a worker failure has to be charged before the round ends, as no departure may explain it."""
    return state.inquest is not None and planned.reason is not Reason.NODE_LEFT


def _running(state: State) -> Iterator[str]:
    """The members that have not stopped yet; `State.running` counts them."""
    for place in state.places:
        agent = state.agents.get(place.agent)
        if agent is not None and agent.status is Status.RUNNING:
            yield place.agent


def _together(reasons: Iterable[str]) -> str:
    """Return the reasons of several leaves as one text; one that is not known is left out beside one that is."""
    distinct = dict.fromkeys(reasons)
    if len(distinct) > 1:
        distinct.pop(LeaveReason.NODE_LEFT.value, None)
    return ", ".join(distinct)
