"""The numbers of nodes that the script can use, as the rounds of the run have shown.

A round has worked if its workers took steps, as far as that is known: see `learn`. Workers of another round that fail
before their first step fail because of its number of nodes then: `is_unusable`. Each number is charged to no worker at
most once in a term, so a script that always fails ends its run all the same.
"""

from __future__ import annotations

from slurm_elastic.rendezvous.membership import transitions
from slurm_elastic.rendezvous.membership.agents import STEPPED, Agent, Reason, WorkerFailure
from slurm_elastic.rendezvous.membership.events import Joined
from slurm_elastic.rendezvous.membership.persistent import replace
from slurm_elastic.rendezvous.membership.state import Phase, Result, State

_SHARE = 0.25
"""Of the time in which the workers of a round have failed: a round of another number that ran longer has worked. The
start of workers takes longer in one round than in another: cold, or on a busy node. For the same reason a round of this
number has worked for certain only if it ran four times as long."""


def learn(state: State, event: Joined, agent: Agent) -> tuple[State, Agent]:
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
    return transitions.start_forming(
        state, Reason.WORKER_FAILED, failure.node, now, detail, failure=failure, unusable=size
    )
