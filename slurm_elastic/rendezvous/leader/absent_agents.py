"""Asks nodes, and Slurm, what has become of members that a leader misses."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping

from slurm_elastic.rendezvous.identity import AgentIdentity
from slurm_elastic.rendezvous.transport.connect import Endpoint, reach
from slurm_elastic.slurm import Controller, JobView, NodeState

__all__ = ["agents_ended", "agents_gone", "known_places"]

_RUNNING = frozenset({"RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING"})
"""States of a job that may have processes (squeue(1), "JOB STATE CODES")."""


async def agents_ended(places: Mapping[str, Endpoint]) -> frozenset[str]:
    """Which of these agents have ended for certain.

    An agent listens from before its first join until its process ends, and its workers end with it. So if its node
    refuses a connection there, the process is gone. No answer at all means nothing.

    Args:
        places: where each agent listens.
    """
    ended = await asyncio.gather(*(_refused(place) for place in places.values()))
    return frozenset(agent for agent, refused in zip(places, ended, strict=True) if refused)


async def _refused(place: Endpoint) -> bool:
    try:
        _, transport, _ = await reach(asyncio.Protocol, place)
    except ConnectionRefusedError:
        return True
    except (OSError, asyncio.TimeoutError):
        return False
    transport.close()
    return False


def agents_gone(agents: Collection[str], controller: Controller) -> frozenset[str]:
    """Which of these agents are gone by Slurm's word: their node is down, or their job does not run (any more) there.

    Blocks as long as Slurm takes. What Slurm does not say is not assumed.
    """
    identities = {
        agent: identity
        for agent in agents
        if (identity := AgentIdentity.parse(agent)) is not None and identity.in_slurm
    }
    nodes = sorted({identity.node for identity in identities.values()})
    jobs = sorted({identity.job for identity in identities.values()})
    down = {node for node, state in controller.node_states(nodes).items() if state is NodeState.DOWN}
    views = {job: controller.job(job) for job in jobs}
    return frozenset(
        agent
        for agent, identity in identities.items()
        if identity.node in down or _has_left(views[identity.job], identity)
    )


def _has_left(view: JobView | None, identity: AgentIdentity) -> bool:
    if view is None:
        return False
    gone = bool(view.nodes) and identity.node not in view.nodes
    return gone or view.restarts > identity.restarts or view.state not in _RUNNING


def known_places(agents: Iterable[str], places: Mapping[str, Endpoint]) -> dict[str, Endpoint]:
    """The places of those agents whose place is known."""
    return {agent: places[agent] for agent in agents if agent in places and places[agent][1]}
