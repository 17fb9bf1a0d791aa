"""Asks nodes and Slurm whether agents that a leader misses have ended."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping

from slurm_elastic.rendezvous.identity import AgentIdentity
from slurm_elastic.rendezvous.transport.connect import Endpoint, reach
from slurm_elastic.slurm import Controller, JobView, NodeState

_RUNNING = frozenset({"RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING"})
"""States of a job that may have processes (squeue(1), "JOB STATE CODES")."""


async def agents_ended(endpoints: Mapping[str, Endpoint]) -> frozenset[str]:
    """Return the agents that have ended for certain.

    An agent listens from before its first join until its process ends, and its workers end with it. So the process has
    ended if its node refuses a connection to that port. A node that does not answer proves nothing.

    Args:
        endpoints: Where each agent listens.
    """
    ended = await asyncio.gather(*(_refused(endpoint) for endpoint in endpoints.values()))
    return frozenset(agent for agent, refused in zip(endpoints, ended, strict=True) if refused)


async def _refused(endpoint: Endpoint) -> bool:
    try:
        _, transport, _ = await reach(asyncio.Protocol, endpoint)
    except ConnectionRefusedError:
        return True
    except (OSError, asyncio.TimeoutError):
        return False
    transport.close()
    return False


def agents_gone(agents: Collection[str], controller: Controller) -> frozenset[str]:
    """Return the agents that are gone by Slurm's view: their node is down, or their job does not run there.

    The call blocks until Slurm answers. An agent of which Slurm does not answer counts as not gone.
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


def known_endpoints(agents: Iterable[str], endpoints: Mapping[str, Endpoint]) -> dict[str, Endpoint]:
    """Return the endpoints of those agents of which the leader knows address and port."""
    return {agent: endpoints[agent] for agent in agents if agent in endpoints and endpoints[agent][1]}
