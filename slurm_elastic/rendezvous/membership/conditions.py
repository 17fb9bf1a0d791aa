"""What follows from the state by itself: losses, verdicts, closing and ending, checked after every event."""

from __future__ import annotations

from dataclasses import replace

from slurm_elastic.rendezvous.membership import transitions
from slurm_elastic.rendezvous.membership.decisions import Decision, Outcome
from slurm_elastic.rendezvous.membership.state import Phase, Reason, State, Status

__all__ = ["advance"]

Result = tuple[State, tuple[Decision, ...]]


def advance(state: State, now: float, *, look_for_silence: bool) -> Result:
    """Draw all consequences of the state at this moment.

    Args:
        state: after the event was processed.
        now: leader's monotonic time.
        look_for_silence: also walk over all agents for silent ones; done on ticks only, as it costs O(agents).
    """
    state, decisions = _give_up_lost(state, now, look_for_silence)
    if state.phase is Phase.RUNNING:
        state, more = _running(state, now)
        decisions += more
    if state.phase is Phase.FORMING:
        state, more = _forming(state, now)
        decisions += more
    return state, decisions


def _give_up_lost(state: State, now: float, look_for_silence: bool) -> Result:
    settings = state.settings
    decisions: tuple[Decision, ...] = ()
    if state.phase is Phase.CLOSED:
        return state, decisions
    lost = {}
    for name in state.broken:
        broken_since = state.agents[name].disconnected_at
        if broken_since is not None and now - broken_since >= settings.reconnect_grace:
            lost[name] = "its connection broke"
    if look_for_silence:
        for name, agent in state.agents.items():
            if not agent.departed and now - agent.last_heard > settings.heartbeat_limit:
                lost.setdefault(name, "silent")
    for name, why in sorted(lost.items()):
        agent = state.agents[name]
        if agent.leave_reason is not None:
            state, more = transitions.retire(state, name, agent.leave_reason, now)
        else:
            state, more = transitions.lose(state, name, why, now)
        decisions += more
    return state, decisions


def _running(state: State, now: float) -> Result:
    table, settings, judgement = state.table, state.settings, state.judgement
    if table is None:
        raise ValueError("a running round has a table")
    if judgement is not None:
        open_questions = judgement.unanswered or state.broken & {place.agent for place in table.places}
        if open_questions or now - judgement.since < settings.settle_time:
            return state, ()
        failure = judgement.failure
        if state.restarts >= settings.max_restarts:
            return transitions.finish(state, Outcome.FAILED, failure)
        state = replace(state, restarts=state.restarts + 1)
        detail = f"rank {failure.rank}: {failure.message or f'exit code {failure.exit_code}'}"
        return transitions.start_forming(state, Reason.WORKER_FAILED, failure.node, now, detail)
    finished = sum(state.agents[place.agent].status is Status.FINISHED for place in table.places)
    if finished == len(table.places):
        return transitions.finish(state, Outcome.SUCCEEDED)
    first, last = state.newcomer_first, state.newcomer_last
    if first is None or last is None or finished or state.broken:
        return state, ()
    if now < min(first + settings.gather_limit, last + settings.gather_quiet):
        return state, ()
    members = {place.agent for place in table.places}
    newcomers = [agent for name, agent in state.agents.items() if name not in members]
    if not newcomers:
        return replace(state, newcomer_first=None, newcomer_last=None), ()
    nodes = ", ".join(agent.candidate.node for agent in sorted(newcomers, key=lambda agent: agent.candidate.order))
    return transitions.start_forming(state, Reason.NODE_JOINED, nodes, now)


def _forming(state: State, now: float) -> Result:
    settings = state.settings
    waiting = len(state.agents) - state.blocking
    if waiting < settings.min_nodes:
        state = replace(state, complete_since=None)
        if now - state.forming_since >= settings.join_timeout:
            detail = f"{waiting} of at least {settings.min_nodes} nodes came within {settings.join_timeout:g} s"
            return transitions.finish(state, Outcome.TIMED_OUT, detail=detail)
        return state, ()
    if state.complete_since is None:
        state = replace(state, complete_since=now)
    if state.blocking or state.broken:
        return state, ()
    if waiting >= settings.max_nodes or not _unknown_nodes(state):
        return transitions.publish(state, now)
    if state.complete_since is not None and now - state.complete_since >= settings.last_call_timeout:
        return transitions.publish(state, now)
    return state, ()


def _unknown_nodes(state: State) -> frozenset[str]:
    """Nodes of the allocation that nobody has heard of yet: the only ones that a last call waits for."""
    expected = state.settings.expected_nodes
    if len(state.agents) + len(state.gone_nodes) < len(expected):
        # Counting is enough to know that some are missing, and spares the walk while thousands join.
        return frozenset(expected[:1])
    present = {agent.candidate.node for agent in state.agents.values()}
    return frozenset(expected) - state.gone_nodes - present
