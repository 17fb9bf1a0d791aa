"""The state of a leader's agents beyond their messages: whether missing ones have ended, and releases that differ."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable, Mapping, Sequence

from slurm_elastic.rendezvous.membership.agents import AgentIdentity
from slurm_elastic.rendezvous.transport.connection import reach
from slurm_elastic.rendezvous.transport.messages import Endpoint
from slurm_elastic.slurm import Controller, JobView, NodeState

_RUNNING = frozenset({"RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING"})
"""States of a job that may have processes (squeue(1), "JOB STATE CODES")."""


async def agents_ended(agents: Iterable[str], endpoints: Mapping[str, Endpoint]) -> frozenset[str]:
    """Return those of the agents that have ended for certain.

    An agent listens from before its first join until its process ends, and its workers end with it. So the process has
    ended if its node refuses a connection to that port. A node that does not answer proves nothing.

    Args:
        endpoints: Where agents listen, as far as the leader knows; on port 0 for one that does not.
    """
    known = [agent for agent in agents if agent in endpoints and endpoints[agent][1]]
    ended = await asyncio.gather(*(_refused(endpoints[agent]) for agent in known))
    return frozenset(agent for agent, refused in zip(known, ended, strict=True) if refused)


async def _refused(endpoint: Endpoint) -> bool:
    try:
        stream, _ = await reach(endpoint)
    except ConnectionRefusedError:
        return True
    except (OSError, asyncio.TimeoutError):
        return False
    stream.close()
    return False


def nodes_down(nodes: Sequence[str], controller: Controller) -> frozenset[str]:
    """Return the nodes that are down by Slurm's view. The call blocks until Slurm answers."""
    return frozenset(node for node, state in controller.node_states(nodes).items() if state is NodeState.DOWN)


def agents_gone(agents: Sequence[str], controller: Controller) -> frozenset[str]:
    """Return the agents that are gone by Slurm's view: their node is down, or their job does not run there.

    The call blocks until Slurm answers. An agent of which Slurm does not answer counts as not gone.
    """
    identities = {
        agent: identity
        for agent in agents
        if (identity := AgentIdentity.parse(agent)) is not None and identity.job != "0"
    }
    nodes = sorted({identity.node for identity in identities.values()})
    jobs = sorted({identity.job for identity in identities.values()})
    down = nodes_down(nodes, controller)
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


def own_releases() -> str:
    """Return the releases that this process has loaded, such as ``Python 3.11, torch 2.15.0+cu130``."""
    torch = sys.modules.get("torch")
    python = f"Python {sys.version_info.major}.{sys.version_info.minor}"
    return python if torch is None else f"{python}, torch {torch.__version__}"


def note_releases(first: dict[str, str], node: str, releases: str) -> str:
    """Return one line for the log if an agent's releases are new and differ from those of another; else empty.

    Args:
        first: The first node with each of the releases that agents of a leader have named; this one is added.
        releases: As in `own_releases`; empty for an agent that does not name them.
    """
    if not releases or releases in first:
        return ""
    others = [f"{other} has {said}" for said, other in first.items()]
    first[releases] = node
    same = "install the same releases on all nodes of a run"
    return f"{node} has {releases}, but {', '.join(others)}; {same}" if others else ""
