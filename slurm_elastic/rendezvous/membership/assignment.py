"""A round's table: who is in it, with which ranks, and in which segments."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from slurm_elastic.rendezvous.membership.agents import Agent, AgentInfo, Reason


@dataclass(frozen=True, slots=True)
class Place:
    """One agent's place in a round, complete: the agent needs nothing else to start its workers.

    Attributes:
        rank: rank of the agent (torch: group rank).
        role_base_rank, role_world_size: the same within its role.
        address, standby_port: where the agent listens, and on which port it leads if it has to.
        domain, domain_base_rank, domain_world_size: its failure domain; rank of its first worker among those of the
            domain, and their number.
    """

    agent: str
    node: str
    rank: int
    local_world_size: int
    base_rank: int
    role: str
    role_base_rank: int
    role_world_size: int
    address: str = ""
    standby_port: int = 0
    domain: str = ""
    domain_base_rank: int = 0
    domain_world_size: int = 0


@dataclass(frozen=True, slots=True)
class Table:
    """A round: complete and never changed once published.

    Attributes:
        round: number, over the whole run.
        store_address, store_port: where the workers' store listens: rank 0's agent.
        restarts: worker failures charged so far, the same for all (TORCHELASTIC_RESTART_COUNT).
        heartbeat_limit: silence after which the leader gives up an agent of this round.
        origin: what its workers start from; see :attr:`~.config.Settings.choose_origin`. Empty for nothing.
        last_failure: fingerprint of the worker failure that was charged last, and what its round had started from;
            empty for none, or without one.
        ran, unusable: see :class:`~.state.State`; a later leader reads them.
    """

    round: int
    reason: Reason
    places: tuple[Place, ...]
    world_size: int
    store_address: str
    store_port: int
    restarts: int
    heartbeat_limit: float = 0.0
    origin: str = ""
    last_failure: str = ""
    ran: tuple[tuple[int, float], ...] = ()
    unusable: tuple[int, ...] = ()


def build_table(round_: int, reason: Reason, candidates: Iterable[AgentInfo], restarts: int) -> Table:
    """Rank the candidates by failure domain, and within one in Slurm's node order.

    The order depends on the candidates alone, so agents that stay keep their relative order from round to round.
    """
    chosen = sorted(candidates, key=lambda candidate: candidate.order)
    role_world, domain_world = Counter[str](), Counter[str]()
    for candidate in chosen:
        role_world[candidate.role] += candidate.local_world_size
        domain_world[candidate.domain] += candidate.local_world_size
    places = []
    base_rank = 0
    role_base, domain_base = Counter[str](), Counter[str]()
    for rank, candidate in enumerate(chosen):
        places.append(
            Place(
                agent=candidate.agent,
                node=candidate.node,
                rank=rank,
                local_world_size=candidate.local_world_size,
                base_rank=base_rank,
                role=candidate.role,
                role_base_rank=role_base[candidate.role],
                role_world_size=role_world[candidate.role],
                address=candidate.address,
                standby_port=candidate.standby_port,
                domain=candidate.domain,
                domain_base_rank=domain_base[candidate.domain],
                domain_world_size=domain_world[candidate.domain],
            )
        )
        base_rank += candidate.local_world_size
        role_base[candidate.role] += candidate.local_world_size
        domain_base[candidate.domain] += candidate.local_world_size
    return Table(
        round=round_,
        reason=reason,
        places=tuple(places),
        world_size=base_rank,
        store_address=chosen[0].address,
        store_port=chosen[0].store_port,
        restarts=restarts,
    )


# Segments are whole groups of K nodes of one failure domain (``--segment K``). What is left of a domain are spares.
def nodes_in_segments(agents: Iterable[Agent], segment: int) -> int:
    """Return how many of the agents are in whole segments of their domains."""
    nodes = Counter(agent.candidate.domain for agent in agents)
    return sum(number - number % segment for number in nodes.values())


def members_by_segment(agents: Sequence[Agent], segment: int, size: int) -> Sequence[Agent]:
    """Return the members of a round.

    Args:
        agents: That wait, those first that a round takes first.
    """
    if segment == 1:
        return agents[:size]
    domains: dict[str, list[tuple[int, Agent]]] = {}
    for preference, agent in enumerate(agents):
        domains.setdefault(agent.candidate.domain, []).append((preference, agent))
    whole = [
        members[begin : begin + segment]
        for members in domains.values()
        for begin in range(0, len(members) - segment + 1, segment)
    ]
    # A segment is preferred as its last node is, so one that trains as a whole stays.
    whole.sort(key=lambda members: members[-1][0])
    return [agent for members in whole[: size // segment] for _, agent in members]
