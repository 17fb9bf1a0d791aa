"""Decisions that follow from the state, checked after every event: losses, inquests, closing and ending.

All that depends on time has one moment at which it is due. The leader gets the earliest one, and acts on it when a
tick arrives, never earlier: before a tick the leader has processed all that agents had sent by then, so that no
agent is given up, and no failure charged, while the explanation waits in the leader's own queue. What is not due is due
at infinity.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from slurm_elastic.rendezvous.membership import leader_change, planned_stop, transitions
from slurm_elastic.rendezvous.membership.agents import Reason, Status, WorkerFailure
from slurm_elastic.rendezvous.membership.assignment import Place, nodes_in_segments
from slurm_elastic.rendezvous.membership.events import Decision, Outcome
from slurm_elastic.rendezvous.membership.persistent import replace
from slurm_elastic.rendezvous.membership.state import Phase, Result, State
from slurm_elastic.rendezvous.membership.stragglers import Stragglers, find_stragglers

_NODES_SHOWN = 8


def advance(state: State, now: float, *, ticked: bool) -> Result:
    """Draw all consequences of the state after an event; if that was a tick, what is due by time alone happens now."""
    decisions: tuple[Decision, ...] = ()
    if ticked:
        state, decisions = _give_up_lost(leader_change.stop_waiting(state, now), now)
    if state.phase is Phase.RUNNING:
        state, more = _running(state, now, ticked)
        decisions += more
    if state.phase is Phase.FORMING:
        state, more = _forming(state, now, ticked)
        decisions += more
    return state, decisions


def next_deadline(state: State) -> float:
    """Return when the machine has to see a :class:`~.events.Tick` at the latest, in leader's monotonic time.

    It may lie in the past: then something became possible that only waits for a tick.
    """
    return min(
        state.ticked_at + state.tick_interval,
        _loss_due(state),
        _inquest_due(state),
        planned_stop.due(state),
        _admission_due(state),
        _last_call_due(state),
        _timeout_due(state),
        leader_change.waiting_ends(state),
    )


def _loss_due(state: State) -> float:
    """Return when an agent with a broken connection may have to be given up."""
    return state.first_broken_at + state.settings.reconnect_grace if state.broken else math.inf


def _inquest_due(state: State) -> float:
    """Return when a worker failure is charged; not while the fate of a member is open."""
    inquest = state.inquest
    if inquest is None or inquest.unanswered:
        return math.inf
    if any(state.agents[name].round == state.round for name in state.broken):
        return math.inf
    if _cut_off(state) is not None:
        return inquest.since
    # The worker that made this one fail may end later than it, and dumps take a while.
    waits = inquest.failure.consequence or inquest.dumps
    # Whether the others fail by themselves, too, tells whether it is this node.
    alone = transitions.may_be_unusable(state) and not transitions.is_unusable(state)
    waits = waits or (alone and len(inquest.failed) < len(state.places))
    wait = state.settings.root_wait if waits else state.settings.settle_time
    return inquest.since + wait


def _admission_due(state: State) -> float:
    """Return when the running round ends for new agents."""
    if state.newcomers is None or state.inquest is not None or state.broken:
        return math.inf
    if state.planned_stop is not None or state.finished:
        return math.inf
    return max(transitions.gathered_at(state, *state.newcomers), state.published_at + state.settings.min_round_time)


def _last_call_due(state: State) -> float:
    """Return when the round closes without the nodes whose fate is unknown; not while others keep it open."""
    if state.complete_since is None or state.blocking or state.broken:
        return math.inf
    return state.complete_since + state.settings.last_call_timeout


def _timeout_due(state: State) -> float:
    """Return when a round that lacks its minimum is given up; not as long as there is no agent."""
    if state.phase is not Phase.FORMING or state.complete_since is not None or not state.agents:
        return math.inf
    return state.forming_since + state.settings.join_timeout


def _give_up_lost(state: State, now: float) -> Result:
    if state.phase is Phase.CLOSED:
        return state, ()
    lost = {}
    for name, agent in state.agents.items():
        if agent.departed:
            continue
        if name in state.broken and now >= state.broken[name] + state.settings.reconnect_grace:
            lost[name] = "its connection broke"
        elif now - agent.last_message_at > state.heartbeat_limit:
            lost[name] = "silent"
    state, decisions = transitions.give_up_all(state, lost, now)
    return replace(state, first_broken_at=min(state.broken.values(), default=math.inf)), decisions


def _running(state: State, now: float, ticked: bool) -> Result:
    # A member that finished stays until the end of the round, whatever becomes of its agent.
    if state.finished == len(state.places):
        return transitions.finish(state, Outcome.SUCCEEDED)
    others = state.settings.agent not in state.agents and state.planned_stop is None and state.inquest is None
    if state.resigning and others:
        # A leader that was no member itself; with one that is, the round ends as with any member that leaves.
        return planned_stop.request(state, Reason.NODE_LEFT, "", "the leader leaves", state.resign_by, now)
    state, decisions = planned_stop.advance(state, now)
    if decisions or not ticked:
        return state, decisions
    if now >= _inquest_due(state):
        return _charge(state, now)
    if now >= planned_stop.due(state):
        return planned_stop.end(state, now)
    if now >= _admission_due(state):
        return _admit(state, now)
    return state, ()


def _charge(state: State, now: float) -> Result:
    inquest = state.inquest
    assert inquest is not None
    failure = inquest.failure
    node = _cut_off(state)
    if node is not None:
        return transitions.end_cut_off(state, node, now)
    if failure.stalled:
        failure = _with_stragglers(failure, find_stragglers(inquest.positions), state.places)
    if transitions.is_unusable(state):
        return transitions.retreat(state, failure, now)
    if not failure.uncharged:
        comparable = _comparable(failure, "" if state.table is None else state.table.origin)
        if comparable and comparable == state.last_failure:
            where = f", {failure.where}" if failure.where else ""
            detail = f"the same failure twice in a row{where} (--stop-on-same-failure off restarts all the same)"
            return transitions.finish(state, Outcome.FAILED, failure, detail)
        if state.restarts >= state.settings.max_restarts:
            return transitions.finish(state, Outcome.FAILED, failure)
        state = replace(state, restarts=state.restarts + 1, last_failure=comparable)
    detail = f"rank {failure.rank}: {failure.summary}"
    return transitions.start_forming(state, Reason.WORKER_FAILED, failure.node, now, detail, failure=failure)


def _cut_off(state: State) -> str | None:
    """Return the node of a member that has stopped its workers itself, if that explains the failure of another one."""
    inquest = state.inquest
    if inquest is None:
        return None
    # Workers that were stopped cannot tell whether they would have failed, too.
    if not inquest.failure.consequence and not transitions.may_be_unusable(state):
        return None
    members = (state.agents.get(place.agent) for place in state.places)
    return next((member.candidate.node for member in members if member is not None and member.cut_off), None)


def _with_stragglers(failure: WorkerFailure, stragglers: Stragglers, places: Sequence[Place]) -> WorkerFailure:
    nodes = tuple(
        (rank, place.node)
        for rank in stragglers.ranks
        for place in places
        if place.base_rank <= rank < place.base_rank + place.local_world_size
    )
    on = f", on {', '.join(dict.fromkeys(node for _, node in nodes[:_NODES_SHOWN]))}" if nodes else ""
    suffix = f"; {stragglers.text}{on}" if stragglers.text else ""
    error = failure.error and failure.error + suffix
    return replace(failure, message=failure.message + suffix, error=error, stragglers=nodes)


def _comparable(failure: WorkerFailure, origin: str) -> str:
    """Return what is equal for the next failure if that is this one again, after the same start.

    A round that starts from an older snapshot can succeed where this one has failed.
    """
    if not failure.fingerprint or not origin:
        return failure.fingerprint
    return f"{failure.fingerprint} | from {origin}"


def _admit(state: State, now: float) -> Result:
    nodes = planned_stop.newcomers(state)
    if not nodes or not transitions.makes_larger(state):
        return replace(state, newcomers=None), ()
    return planned_stop.request(state, Reason.NODE_JOINED, nodes, "", math.inf, now)


def _forming(state: State, now: float, ticked: bool) -> Result:
    settings = state.settings
    if state.resigning:
        return leader_change.resign(state)
    quorum = leader_change.has_quorum(state)
    if quorum is not state.quorate:
        state = replace(state, quorate=quorum)
    if quorum and not state.claimed and not state.claiming:
        return leader_change.claim(state)
    waiting = len(state.agents) - state.blocking
    usable = _usable(state, waiting, now)
    if not state.round_size(usable) or not quorum or not state.claimed:
        if state.complete_since is not None:
            state = replace(state, complete_since=None)
        if ticked and now >= _timeout_due(state):
            detail = f"{waiting} of at least {settings.min_nodes} nodes came within {settings.join_timeout:g} s"
            if waiting >= settings.min_nodes:
                detail = f"no majority of the last round came within {settings.join_timeout:g} s"
            if settings.round_size(waiting) and not settings.round_size(usable):
                detail = (
                    f"{waiting} nodes came, and too few failure domains have {settings.segment} of them (--segment)"
                )
            if settings.round_size(usable) and quorum and state.claimed:
                detail = f"{state.why_unusable}; no other nodes came within {settings.join_timeout:g} s"
                return transitions.finish(state, Outcome.TIMED_OUT, state.unusable_failure, detail)
            return transitions.finish(state, Outcome.TIMED_OUT, detail=detail)
        return state, ()
    if state.complete_since is None:
        state = replace(state, complete_since=now)
    if state.blocking or state.broken or state.awaited:
        return state, ()
    if (ticked and now >= _last_call_due(state)) or not _may_become_larger(state, waiting, usable):
        return transitions.publish(state, now)
    return state, ()


def _usable(state: State, waiting: int, now: float) -> int:
    """Return how many of the waiting agents a round could take: those in whole segments."""
    if state.settings.segment == 1:
        return waiting
    missing = _missing_by_count(state)
    more_come = missing > 0 and state.round_size(waiting + missing) > state.round_size(waiting)
    if (state.blocking or more_come) and now < min(_last_call_due(state), _timeout_due(state)):
        # Nothing is decided before the others are here, and thousands join one by one.
        return waiting
    here = (agent for agent in state.agents.values() if agent.status is Status.WAITING)
    return nodes_in_segments(here, state.settings.segment)


def _missing_by_count(state: State) -> int:
    return len(state.settings.expected_nodes) - len(state.agents) - len(state.gone_nodes)


def _may_become_larger(state: State, waiting: int, usable: int) -> bool:
    """Return whether nodes without a sign of an agent yet would make the round larger; a last call waits for no other.

    They are those of the allocation. A leader that belongs to none learns from those that come how many one srun has
    started with them. That counts for the first round, and when all have gone and others come, but for no other round.
    """
    expected, round_size = state.settings.expected_nodes, state.round_size
    if not expected and leader_change.begins_anew(state):
        missing = transitions.missing_of_cohorts(state)
        return missing > 0 and round_size(waiting + missing) > round_size(usable)
    missing = _missing_by_count(state)
    if missing > 0 and round_size(waiting + missing) > round_size(usable):
        # Counting is enough to know that some are missing, and spares the walk while thousands join.
        return True
    missing = sum(node not in state.on_node and node not in state.gone_nodes for node in expected)
    return missing > 0 and round_size(waiting + missing) > round_size(usable)
