"""Segments: rounds of whole groups of K nodes of one failure domain (``--segment K``). Pure.

`advance` and `pending_joins` count by them, `transitions` chooses members by them. What is left of a domain after its
whole segments are spares. Without ``--segment`` each node is a segment, and nothing here costs anything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from slurm_elastic.rendezvous.membership.agents import Agent


def nodes_in_segments(agents: Iterable[Agent], segment: int) -> int:
    """Return how many of the agents are in whole segments of their domains."""
    nodes = Counter(agent.candidate.domain for agent in agents)
    return sum(number - number % segment for number in nodes.values())


def members_by_segment(agents: Sequence[Agent], segment: int, size: int) -> Sequence[Agent]:
    """Return the members of a round.

    Args:
        agents: That wait, those first that a round takes first.
        segment: Nodes of a segment.
        size: Number of members, a multiple of `segment`.
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
