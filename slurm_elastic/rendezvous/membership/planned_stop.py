"""The planned end of a round: everybody stops at one step, so that none is lost.

The members are asked for the earliest step at which their workers can stop; the latest of the answers is the step at
which all of them do. The round keeps running until every member has stopped. A member that takes no part, or does not
keep to it, makes it an ordinary interruption.
"""

from __future__ import annotations

from collections.abc import Iterator

from slurm_elastic.rendezvous.membership import transitions
from slurm_elastic.rendezvous.membership._replace import replace
from slurm_elastic.rendezvous.membership.agents import Status
from slurm_elastic.rendezvous.membership.decisions import Decision, Hold, Retire, StopAt
from slurm_elastic.rendezvous.membership.events import Held, Left
from slurm_elastic.rendezvous.membership.reasons import Reason
from slurm_elastic.rendezvous.membership.state import Result, State, Winding, without_agent

__all__ = ["advance", "answer", "due", "end", "farewell", "newcomers", "remind", "revise", "seconds_to_stop", "wind"]


_MUCH_EARLIER = 1.0
"""Seconds by which a deadline has to come nearer for workers that know their step to be told again. The agents of one
job leave one after the other with the same deadline, which is no news to anybody."""


def seconds_to_stop(seconds: float, margin: float) -> float:
    """How long workers may run on towards an agreed step when their agent has to be gone in `seconds`.

    Args:
        seconds: left until then; negative if it is past.
        margin: seconds for stopping them by force, if it comes to that. Of a short time it takes at most half.
    """
    return max(0.0, seconds - margin, seconds / 2)


def wind(state: State, reason: Reason, node: str, detail: str, deadline: float | None, now: float) -> Result:
    """Ask the members for a step to stop at; if they are asked already, note one more cause.

    Args:
        state: with a running round in which no worker failure is being judged.
        reason, node, detail: the cause.
        deadline: when whoever still runs has to be interrupted, in leader's monotonic time.
        now: the same at this moment.
    """
    table, winding = state.table, state.winding
    if table is None:
        raise ValueError("no round is running")
    if winding is None:
        state = replace(state, winding=Winding(reason, node, detail, since=now, deadline=deadline))
        return state, (Hold(tuple(_running(state)), table.round),)
    merged = _merge(winding, reason, node, detail, deadline)
    state = replace(state, winding=merged)
    if winding.stop is None or deadline is None:
        return state, ()
    if winding.deadline is not None and deadline > winding.deadline - _MUCH_EARLIER:
        return state, ()
    return state, (_stop_at(merged, tuple(_running(state)), table.round, winding.stop, now),)


def revise(state: State, now: float) -> Result:
    """A member that leaves has said anew why, and how long it has: the newest word counts, also for a longer time."""
    winding, table = state.winding, state.table
    if winding is None or table is None:
        return state, ()
    members = [state.agents[place.agent] for place in table.places if place.agent in state.agents]
    leaving = [agent for agent in members if agent.leave_reason is not None]
    deadline = min((agent.leave_deadline for agent in leaving if agent.leave_deadline is not None), default=None)
    detail = winding.detail
    if winding.reason is Reason.NODE_LEFT:
        detail = ", ".join(
            dict.fromkeys(agent.leave_reason.value for agent in leaving if agent.leave_reason is not None)
        )
    revised = replace(winding, deadline=deadline, detail=detail)
    state = replace(state, winding=revised)
    if winding.stop is None or not _differs(deadline, winding.deadline):
        return state, ()
    return state, (_stop_at(revised, tuple(_running(state)), table.round, winding.stop, now),)


def answer(state: State, event: Held, now: float) -> Result:
    """Note from which step on the workers of a member can stop; None from a member that does not, or no more."""
    known, winding, table = state.agents.get(event.agent), state.winding, state.table
    if known is None or winding is None or table is None or event.round != table.round:
        return state, ()
    if known.status is not Status.RUNNING or not state.is_member(known):
        return state, ()
    if event.step is None:
        return (state, ()) if _verdict_first(state, winding) else end(state, now)
    if winding.stop is not None:
        return state, ()
    answers = winding.answers.set(event.agent, event.step)
    return replace(state, winding=replace(winding, answers=answers)), ()


def farewell(state: State, event: Left) -> Result:
    """Let a member go whose workers have stopped at the agreed step: the others run on to it."""
    winding, judgement = state.winding, state.judgement
    if winding is None:
        raise ValueError("the round that runs is not about to end")
    if judgement is not None:
        judgement = replace(judgement, unanswered=judgement.unanswered - {event.agent})
    node = state.agents[event.agent].candidate.node
    state = replace(
        without_agent(state, event.agent),
        winding=replace(winding, gone=(*winding.gone, event.agent)),
        judgement=judgement,
        gone=state.gone | {event.agent},
    )
    return state, (Retire(event.agent, node, event.reason),)


def remind(state: State, name: str, now: float) -> tuple[Decision, ...]:
    """Say once more to a member what it may have missed."""
    winding, table = state.winding, state.table
    if winding is None or table is None:
        return ()
    if winding.stop is None:
        return (Hold((name,), table.round),)
    return (_stop_at(winding, (name,), table.round, winding.stop, now),)


def advance(state: State, now: float) -> Result:
    """Agree on the step when all have answered, and end the round when all have stopped."""
    winding, table = state.winding, state.table
    if winding is None or table is None or state.judgement is not None:
        return state, ()
    if not state.running:
        return end(state, now)
    if winding.stop is not None or len(winding.answers) < state.running:
        return state, ()
    if not all(name in winding.answers for name in _running(state)):
        return state, ()
    stop = max(winding.answers.values())
    winding = replace(winding, stop=stop)
    return replace(state, winding=winding), (_stop_at(winding, tuple(_running(state)), table.round, stop, now),)


def due(state: State) -> float | None:
    """When the members that still run are interrupted; None while they have all the time they want."""
    winding = state.winding
    if winding is None or _verdict_first(state, winding):
        return None
    # Workers stand still from their answer on until all have answered, so a missing one is not waited for long.
    unanswered = winding.since + state.settings.heartbeat_limit if winding.stop is None else None
    return min((moment for moment in (winding.deadline, unanswered) if moment is not None), default=None)


def end(state: State, now: float) -> Result:
    """End the round, interrupting those that still run."""
    winding = state.winding
    if winding is None:
        raise ValueError("the round that runs is not about to end")
    stop = None if state.running else winding.stop
    node = newcomers(state) or winding.node if winding.reason is Reason.NODE_JOINED else winding.node
    return transitions.start_forming(state, winding.reason, node, now, winding.detail, step=stop)


def newcomers(state: State) -> str:
    """The nodes of all agents that have no place in the round that runs, in the order of ranks."""
    found = sorted(
        (agent.candidate for agent in state.agents.values() if not state.is_member(agent)),
        key=lambda candidate: candidate.order,
    )
    return ", ".join(candidate.node for candidate in found)


def _verdict_first(state: State, winding: Winding) -> bool:
    """Whether a worker failure has to be charged before the round ends, as no departure may explain it."""
    return state.judgement is not None and winding.reason is not Reason.NODE_LEFT


def _differs(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is not other
    return abs(one - other) > _MUCH_EARLIER


def _running(state: State) -> Iterator[str]:
    """The members that have not stopped yet; `State.running` counts them."""
    for place in state.table.places if state.table is not None else ():
        agent = state.agents.get(place.agent)
        if agent is not None and agent.status is Status.RUNNING:
            yield place.agent


def _merge(winding: Winding, reason: Reason, node: str, detail: str, deadline: float | None) -> Winding:
    """A leave outweighs growth; several leaves are named together."""
    if reason is Reason.NODE_LEFT and winding.reason is Reason.NODE_LEFT:
        node = f"{winding.node}, {node}"
        detail = winding.detail if detail in winding.detail else f"{winding.detail}, {detail}"
    elif reason is Reason.NODE_JOINED:
        reason, node, detail = winding.reason, winding.node, winding.detail
    deadlines = [moment for moment in (winding.deadline, deadline) if moment is not None]
    return replace(winding, reason=reason, node=node, detail=detail, deadline=min(deadlines, default=None))


def _stop_at(winding: Winding, agents: tuple[str, ...], round_: int, step: int, now: float) -> StopAt:
    seconds = None if winding.deadline is None else max(0.0, winding.deadline - now)
    return StopAt(agents, round_, step, winding.reason, winding.node, seconds, winding.detail)
