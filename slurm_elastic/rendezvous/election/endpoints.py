"""The endpoints that an agent tries in the election: where a leader may be, and where candidates are. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from slurm_elastic.rendezvous.election.leader_location import Answer
from slurm_elastic.rendezvous.election.policy import RESTORE, Successor
from slurm_elastic.rendezvous.election.state import Campaigning, Election, Leading
from slurm_elastic.rendezvous.transport.connect import Endpoint

FIRST_TRIED = 8
"""Agents that may follow the leader and are tried at once; one by an agent that searches among thousands."""


def of_search(state: Election, now: float) -> tuple[Endpoint, ...]:
    """Return the endpoints of the search for a leader, in order.

    An agent that campaigns or leads follows itself.
    """
    search = state.search
    if isinstance(state.campaign, Campaigning | Leading):
        return state.config.endpoints[:1]
    location, left, last = state.lookup.location, state.known.left, state.known.endpoint
    endpoints = [endpoint for endpoint in location.endpoints if endpoint != left]
    if search.lost is not None and search.lost != left:
        endpoints.insert(0, search.lost)
    if now >= search.asks_at and (search.lost_at is not None or now >= search.began + RESTORE):
        endpoints += _of_candidates(state, now)
        if last is not None and last not in (left, *state.config.endpoints):
            # It may campaign again. Candidates step down for it, so they have to find it then.
            endpoints.append(last)
    return tuple(dict.fromkeys(endpoints))


def _of_candidates(state: Election, now: float) -> list[Endpoint]:
    """Return the endpoints of the first agents that may campaign, as many more each second, and of those before them.

    A round on record may have thousands of members, each of which would otherwise try each other.
    """
    search, attempts, leaving = state.search, state.search.attempts, state.known.leaving
    # All of thousands ask the same agents, of which the first leads next, unless it has ended.
    most = (1 if search.least_pause else FIRST_TRIED) * (1 + int(now - max(search.began, search.asks_at)))
    endpoints: list[Endpoint] = []
    for successor in state.known.order(state.lookup.location):
        if successor.agent == state.config.agent:
            continue
        endpoint = (successor.address, successor.port)
        endpoints.append(endpoint)
        in_vain = attempts.answer(endpoint) in (Answer.ENDED, Answer.SILENT)
        most -= not in_vain and successor.agent not in leaving
        if most <= 0:
            break
    return endpoints


def of_rivals(state: Election) -> tuple[Endpoint, ...]:
    """Return the endpoints of a possible leader, and of the candidates that precede this one."""
    members, location, own = state.known, state.lookup.location, state.config.agent
    order = members.order(location)
    names = [successor.agent for successor in order]
    ahead = order[: names.index(own)] if own in names else order
    endpoints = [*location.endpoints, *((successor.address, successor.port) for successor in ahead)]
    if members.endpoint is not None:
        # The last leader is no successor of its own. It may have come back too late to lead, and campaign as well.
        endpoints.append(members.endpoint)
    others = (members.left, *state.config.endpoints)
    return tuple(dict.fromkeys(endpoint for endpoint in endpoints if endpoint not in others))


def succession(state: Election) -> tuple[Sequence[Successor], set[str]]:
    """Return the order of succession, and the agents that are known to have ended or left for good."""
    order = [*state.known.order(state.lookup.location)]
    ended = state.search.attempts.with_answer(Answer.ENDED)
    return order, {
        successor.agent for successor in order if (successor.address, successor.port) in ended
    } | state.known.gone


def agent_at(state: Election, endpoint: Endpoint, order: Collection[Successor]) -> str:
    """Return the agent that listens at an endpoint; empty if it is not known.

    A leader that is lost before it gave an assignment here is not the one that gave the last.
    """
    if endpoint == state.known.endpoint:
        return state.known.leader
    return next((successor.agent for successor in order if (successor.address, successor.port) == endpoint), "")
