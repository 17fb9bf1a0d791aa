"""New agents on their way into a running round: who is known to come, and how long those that are there wait for them.

A round that ends for new agents costs the members time, so it ends once for all that come together. Two things tell the
leader of an agent before it joins: it has connected and says that it will, while it still imports what its workers
need; and one srun starts a known number of agents, its cohort, which join as fast as their nodes let them.
"""

from __future__ import annotations

from slurm_elastic.rendezvous.membership._replace import replace
from slurm_elastic.rendezvous.membership.agents import AgentInfo
from slurm_elastic.rendezvous.membership.state import State


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
    places = len(state.table.places) if state.table is not None else 0
    return state.round_size(state.usable) > places


def gathered_at(state: State) -> float | None:
    """Return when the new agents count as gathered, in leader's monotonic time; None if there are none."""
    first, last, settings = state.newcomer_first, state.newcomer_last, state.settings
    if first is None or last is None:
        return None
    gathered = min(first + settings.gather_limit, last + settings.gather_quiet)
    return max(gathered, first + settings.last_call_timeout) if _more_to_come(state) else gathered


def _more_to_come(state: State) -> bool:
    """Return whether agents are known to be on their way that make the next round larger."""
    here, more = len(state.agents), len(state.coming) + missing_of_cohorts(state)
    return more > 0 and state.round_size(here + more) > state.round_size(state.usable)
