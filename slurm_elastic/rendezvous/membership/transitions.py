"""The moves that several events share: lose or retire an agent, wait for new ones, begin, publish, retreat and end."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from slurm_elastic.rendezvous.membership import events
from slurm_elastic.rendezvous.membership.agents import (
    STEPPED,
    Agent,
    AgentInfo,
    LeaveReason,
    Reason,
    Status,
    WorkerFailure,
)
from slurm_elastic.rendezvous.membership.assignment import build_table, members_by_segment, nodes_in_segments
from slurm_elastic.rendezvous.membership.config import Base
from slurm_elastic.rendezvous.membership.persistent import NamedMap, replace
from slurm_elastic.rendezvous.membership.state import Phase, Result, State, answered, with_agent, without_agent

_SHARE = 0.25
"""Of the time in which the workers of a round have failed: a round of another number that ran longer has worked. The
start of workers takes longer in one round than in another: cold, or on a busy node. For the same reason a round of this
number has worked for certain only if it ran four times as long."""


_ROUND_OVER: dict[str, Any] = dict.fromkeys(("complete_since", "inquest", "newcomers", "planned_stop"))
"""What the leader knows of a round that runs, and no more when it is over."""


def give_up_all(state: State, lost: Mapping[str, str], now: float) -> Result:
    """Go on without these agents, of each of which it is said why."""
    decisions: tuple[events.Decision, ...] = ()
    for name, why in sorted(lost.items()):
        state, more = give_up(state, name, why, now)
        decisions += more
    return state, decisions


def give_up(state: State, name: str, why: str, now: float) -> Result:
    """Go on without an agent, whether it has announced its departure or not."""
    agent = state.agents[name]
    if agent.leave_reason is not None:
        return retire(state, name, agent.leave_reason, now, lingers=agent.status is not Status.WAITING)
    drop = events.Drop(name, agent.candidate.node, why, now - agent.last_message_at)
    return _remove(state, name, drop, Reason.NODE_LOST, why, now)


def retire(state: State, name: str, reason: LeaveReason, now: float, *, lingers: bool = False) -> Result:
    """Let go an agent that has announced it, and has no workers any more.

    With `lingers` that is not known: it was given up before its Left came.
    """
    decision = events.Retire(name, state.agents[name].candidate.node, reason)
    # An agent that has announced its leave joins no leader any more: no other side can count on it.
    lingering = state.lingering | {name} if lingers else state.lingering
    state = replace(state, gone=state.gone | {name}, lingering=lingering, quorate=False)
    return _remove(state, name, decision, Reason.NODE_LEFT, reason.value, now)


def _remove(state: State, name: str, decision: events.Decision, reason: Reason, detail: str, now: float) -> Result:
    agent = state.agents[name]
    if not state.is_member(agent):
        return without_agent(state, name), (decision,)
    if agent.status is Status.FINISHED:
        # It has done its part: the others need nothing more of it, and finish or fail without it.
        return _depart(state, agent), (decision,)
    if agent.status is Status.WAITING and state.planned_stop is not None and state.inquest is None:
        # Its workers have stopped where the others will.
        return without_agent(state, name), (decision,)
    state, more = start_forming(without_agent(state, name), reason, agent.candidate.node, now, detail)
    return state, (decision, *more)


def _depart(state: State, agent: Agent) -> State:
    name = agent.candidate.agent
    state = answered(with_agent(state, replace(agent, departed=True)), name)
    return replace(state, broken=state.broken.without(name))


def start_forming(
    state: State,
    reason: Reason,
    node: str,
    now: float,
    detail: str = "",
    *,
    step: int | None = None,
    failure: WorkerFailure | None = None,
    unusable: int | None = None,
) -> Result:
    """End the running round: members that have workers have to stop them and join again, or go.

    `step` is the stop step, if all workers have stopped there. `failure` is the one of a worker
    that ends the round, if one does; `unusable` is the number of its nodes, if that is why.
    """
    interrupted = list(state.planned_stop.gone) if state.planned_stop is not None else []
    ending: dict[str, Agent] = {}
    for place in state.places:
        agent = state.agents.get(place.agent)
        if agent is None:
            continue
        if agent.departed:
            state = without_agent(state, place.agent)
        elif agent.status in (Status.RUNNING, Status.FINISHED):
            if agent.status is Status.RUNNING or agent.leave_reason is None:
                interrupted.append(place.agent)
            ending[place.agent] = replace(agent, status=Status.STOPPING)
    message = events.Interrupted(state.round, reason, node, detail, state.restarts)
    state = replace(
        state,
        # These block the next round as they did: see `with_agent`.
        agents=state.agents.update(ending),
        running=0,
        finished=0,
        phase=Phase.FORMING,
        round=state.round + 1,
        reason=reason,
        forming_since=now,
        **_ROUND_OVER,
    )
    return state, (events.Interrupt(tuple(interrupted), message, step=step, failure=failure, unusable=unusable),)


def end_cut_off(state: State, node: str, now: float) -> Result:
    """End the round of an agent that was cut off long enough to stop its workers, and not long enough to be dropped."""
    detail = "it did not hear the leader, stopped its workers and is back"
    return start_forming(state, Reason.NODE_LOST, node, now, detail)


def publish(state: State, now: float) -> Result:
    """Close the round: of the waiting agents the largest valid number gets places; the others are spares.

    A member of the last round keeps its place, so that a spare displaces no member; those first that have trained.
    """
    settings = state.settings
    members = frozenset(state.base.members if state.base is not None else ())
    agents = [agent for agent in state.agents.values() if agent.status is Status.WAITING]
    agents.sort(key=lambda agent: (agent.candidate.agent not in members, not agent.proven, agent.candidate.order))
    waiting = [agent.candidate for agent in agents]
    size = state.round_size(nodes_in_segments(agents, settings.segment))
    limit = settings.limit_of(len(state.agents))
    base = state.base
    origin = settings.choose_origin(
        None if base is None else base.round,
        "" if base is None else base.origin,
        # Of spares, too: their memory lives.
        [candidate.inventory for candidate in waiting],
        # A round without a step has not shown that its origin is bad.
        state.reason is Reason.WORKER_FAILED and len(members) not in state.unusable,
    )
    members_next = [agent.candidate for agent in members_by_segment(agents, settings.segment, size)]
    table = dataclasses.replace(
        build_table(state.round, state.reason, members_next, state.restarts),
        heartbeat_limit=limit,
        origin=origin,
        last_failure=state.last_failure,
        ran=tuple(sorted(state.ran.items())),
        unusable=tuple(sorted(state.unusable)),
    )
    agents_next = state.agents.update(
        {
            place.agent: replace(state.agents[place.agent], status=Status.RUNNING, round=table.round, cut_off=False)
            for place in table.places
        }
    )
    absent = [node for node in settings.expected_nodes if node not in state.on_node]
    spares = tuple(
        events.Send((name,), events.Waiting()) for name, agent in agents_next.items() if agent.status is Status.WAITING
    )
    state = replace(
        settle(state),
        agents=agents_next,
        blocking=len(table.places),
        running=len(table.places),
        finished=0,
        present=0,
        quorate=False,
        phase=Phase.RUNNING,
        table=table,
        complete_since=None,
        published_at=now,
        # Nodes that have not come by now are not waited for again.
        gone_nodes=state.gone_nodes | frozenset(absent),
        base=Base(
            table.round,
            tuple(place.agent for place in table.places),
            settings.agent,
            limit,
            origin,
        ),
        heartbeat_limit=limit,
        gone=frozenset(),
        lingering=frozenset(),
        ended=frozenset(),
        awaited=NamedMap(),
    )
    return state, (events.Publish(table, now - state.forming_since), *spares)


def finish(state: State, outcome: events.Outcome, failure: WorkerFailure | None = None, detail: str = "") -> Result:
    """End the run for all agents."""
    if state.finish is not None:
        return state, ()
    decision = events.Finish(tuple(state.agents), events.Ended(outcome, failure, detail), everyone=True)
    state = replace(
        state,
        phase=Phase.CLOSED,
        finish=decision,
        broken=NamedMap(),
        **_ROUND_OVER,
    )
    return state, (decision,)


# New agents on their way into a running round, which ends once for all that come together. Two things tell the leader
# of an agent before it joins: it has connected and says that it will, and one srun starts a known number, its cohort.
def announce(state: State, name: str) -> State:
    """Note that an agent which has no place yet will join soon."""
    if name in state.agents or name in state.gone_agents:
        return state
    return replace(state, coming=state.coming | {name})


def withdraw(state: State, name: str) -> State:
    """Note that an agent is not awaited any more: it has joined, or will not."""
    return replace(state, coming=state.coming - {name}) if name in state.coming else state


def note_cohort(state: State, candidate: AgentInfo) -> State:
    """Take note of an agent that joins and is not among the agents yet."""
    state = withdraw(state, candidate.agent)
    if candidate.cohort_size == 1 or candidate.agent in state.gone_agents:
        return state
    others = state.not_joined.get(candidate.cohort, candidate.cohort_size) - 1
    return replace(state, not_joined={**state.not_joined, candidate.cohort: others})


def settle(state: State) -> State:
    """Stop to wait for the rest of the cohorts that are here: it had its time to come.

    To be called when a round is published.
    """
    cohorts = [cohort for cohort in state.cohorts if cohort in state.not_joined]
    return replace(state, not_joined={**state.not_joined, **dict.fromkeys(cohorts, 0)}) if cohorts else state


def missing_of_cohorts(state: State) -> int:
    """Return how many agents are still to come that were started together with one of those that are here.

    While a round runs these are newcomers: no agent is missing of a cohort that was here when it was published.
    """
    # Not the other way round: each element of an array is a cohort of its own, of which no other agent comes.
    return sum(count for cohort, count in state.not_joined.items() if count > 0 and cohort in state.cohorts)


def makes_larger(state: State) -> bool:
    """Return whether all agents that are here make a larger round than the one that runs."""
    return state.round_size(state.usable) > len(state.places)


def gathered_at(state: State, first: float, last: float) -> float:
    """Return when the new agents count as gathered, by the leader's monotonic times of the first and the last join."""
    settings = state.settings
    gathered = min(first + settings.gather_limit, last + settings.gather_quiet)
    return max(gathered, first + settings.last_call_timeout) if _more_to_come(state) else gathered


def _more_to_come(state: State) -> bool:
    """Return whether agents are known to be on their way that make the next round larger."""
    here, more = len(state.agents), len(state.coming) + missing_of_cohorts(state)
    return more > 0 and state.round_size(here + more) > state.round_size(state.usable)


# The numbers of nodes that the script can use, as the rounds of the run have shown.
#
# A round has worked if its workers took steps, as far as that is known: see `learn`. Workers of another round that fail
# before their first step fail because of its number of nodes then: `is_unusable`. Each number is charged to no worker
# at most once in a term, so a script that always fails ends its run all the same.
def learn(state: State, event: events.Joined, agent: Agent) -> tuple[State, Agent]:
    """Note that the last round has worked, as one of its members says that joins again.

    Where no step is reported, the seconds count for which its workers ran before it ended for another reason than
    their failure.
    """
    base, ran = state.base, event.candidate.ran
    if event.candidate.proven:
        agent = replace(agent, proven=True)
    if base is None or event.last_round != base.round or ran <= 0:
        return state, agent
    if state.phase is Phase.FORMING:
        ended_well = state.reason is not Reason.WORKER_FAILED
    else:
        ended_well = state.planned_stop is not None and state.inquest is None
    if ran < STEPPED and not ended_well:
        return state, agent
    size = len(base.members)
    if ran > state.ran.get(size, 0.0):
        state = replace(state, ran={**state.ran, size: ran})
    return state, replace(agent, proven=True)


def may_be_unusable(state: State) -> bool:
    """Return whether the failure that is being judged can come from the number of nodes, by the time of it."""
    inquest = state.inquest
    if inquest is None or inquest.failure.uncharged:
        return False
    size, ran = len(state.places), inquest.failure.ran
    others = (seconds for other, seconds in state.ran.items() if other != size and other not in state.unusable)
    has_worked = state.ran.get(size, 0.0) * _SHARE > ran
    return ran < STEPPED and not has_worked and max(others, default=0.0) > ran * _SHARE


def is_unusable(state: State) -> bool:
    """Return whether that failure comes from the number of nodes: several nodes report one, or one that has trained.

    A node whose workers fail alone in its first round may be bad itself.
    """
    inquest = state.inquest
    if inquest is None or not may_be_unusable(state):
        return False
    agents = [agent for name in inquest.roots or inquest.failed if (agent := state.agents.get(name)) is not None]
    return len(agents) > 1 or any(agent.proven for agent in agents)


def retreat(state: State, failure: WorkerFailure, now: float) -> Result:
    """End the round, and go on with a number of nodes that has worked; nothing is charged."""
    size = len(state.places)
    state = replace(state, unusable=state.unusable | {size}, unusable_failure=failure)
    next_size = replace(state, phase=Phase.FORMING).round_size(state.usable)
    worked = ",".join(str(size) for size in sorted(state.ran) if size not in state.unusable)
    then = f"going on with {next_size}" if next_size else f"waiting {state.settings.join_timeout:g} s for other nodes"
    detail = f"{state.why_unusable}; {then}: --valid-nodes={worked}"
    return start_forming(state, Reason.WORKER_FAILED, failure.node, now, detail, failure=failure, unusable=size)
