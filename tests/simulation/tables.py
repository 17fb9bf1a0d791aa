"""What every table has to be: complete, in Slurm's order, and in the order of the one before."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from itertools import pairwise

from slurm_elastic.rendezvous.membership.agents import AgentInfo
from slurm_elastic.rendezvous.membership.assignment import Table
from slurm_elastic.rendezvous.membership.config import Settings
from slurm_elastic.rendezvous.membership.state import State
from tests.simulation.violation import require


def largest(settings: Settings, agents: int, without: AbstractSet[int] = frozenset()) -> int:
    """How many of so many agents a round has to take, not one of these numbers; 0 if none can be."""
    sizes = [size for size in range(settings.min_nodes, settings.max_nodes + 1) if size <= agents]
    valid = (size for size in sizes if not settings.valid_nodes or size in settings.valid_nodes)
    return max((size for size in valid if size not in without), default=0)


def usable(settings: Settings, agents: Iterable[AgentInfo]) -> int:
    """How many of these agents a round could take: those in whole segments of a domain."""
    domains = Counter(agent.domain for agent in agents)
    return sum(count // settings.segment * settings.segment for count in domains.values())


def check_table(state: State, table: Table, before: Table | None, size: int) -> None:
    """Check a table of a leader in this state, that follows another if there was one, and has so many nodes."""
    settings, places = state.settings, table.places
    promise = "tables are complete"
    require(settings.min_nodes <= len(places) <= settings.max_nodes, promise, f"{len(places)} nodes")
    require(len(places) == size, "a round takes the largest valid number", len(places))
    require([place.rank for place in places] == list(range(len(places))), promise, places)
    candidates = [state.agents[place.agent].candidate for place in places]
    require(candidates == sorted(candidates, key=lambda candidate: candidate.order), "ranks follow Slurm's order")
    domains = [candidate.domain for candidate in candidates]
    borders = sum(domain != following for domain, following in pairwise(domains))
    require(borders == len(set(domains)) - 1, "ranks of a domain are beside each other", domains)
    require(all(domains.count(domain) % settings.segment == 0 for domain in domains), "segments are whole", domains)
    if before is not None:
        now = {place.agent: place.rank for place in places}
        ranks = [now[place.agent] for place in before.places if place.agent in now]
        require(ranks == sorted(ranks), "survivors keep their order", places)
    base, roles = 0, Counter[str]()
    for place, candidate in zip(places, candidates, strict=True):
        told = (place.node, place.local_world_size, place.role)
        require(told == (candidate.node, candidate.local_world_size, candidate.role), promise, place)
        require((place.base_rank, place.role_base_rank) == (base, roles[place.role]), promise, place)
        base += place.local_world_size
        roles[place.role] += place.local_world_size
    require(table.world_size == base, promise, table)
    require(all(place.role_world_size == roles[place.role] for place in places), promise, places)
    store = (candidates[0].address, candidates[0].store_port)
    require((table.store_address, table.store_port) == store, promise, table)
