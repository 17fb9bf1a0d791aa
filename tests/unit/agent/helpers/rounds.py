"""Places of agents in rounds, with facts that do not matter to a test filled in."""

from __future__ import annotations

from typing import Any

from slurm_elastic.rendezvous.membership.agents import Reason
from slurm_elastic.rendezvous.membership.assignment import Place
from slurm_elastic.rendezvous.transport.messages import Assignment


def placed(node: str, *, rank: int = 0, workers: int = 1, nodes: int = 2, round_: int = 3, **facts: Any) -> Assignment:
    """Return the assignment of a node's agent in a round whose nodes have as many workers each."""
    base, world = rank * workers, nodes * workers
    place = Place(f"{node}/7.0/1", node, rank, workers, base, "default", base, world, node, 1)
    reason = facts.pop("reason", Reason.START)
    return Assignment(1, place, round_, reason, nodes, world, "n1", 1, facts.pop("restarts", 0), **facts)
