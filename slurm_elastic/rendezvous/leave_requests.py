"""Asking agents to leave: the leader passes it on, and each of them announces its leave as for a signal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from slurm_elastic.rendezvous.identity import job_of
from slurm_elastic.rendezvous.membership import LeaveReason
from slurm_elastic.slurm import natural_key


@dataclass(frozen=True, slots=True)
class LeaveRequest:
    """To the leader: these agents have to leave.

    Attributes:
        agent: Identity of the sender, an agent or a client.
        nodes: Nodes of the agents; empty for all.
        job: Job of the agents, as in `job_of`; empty for every job of the run.
        reason: Reason of the leave.
        seconds: Seconds from now until they have to have left; None without a limit.
        detail: The reason as text for logs.
    """

    agent: str
    nodes: tuple[str, ...]
    job: str
    reason: LeaveReason
    seconds: float | None
    detail: str


@dataclass(frozen=True, slots=True)
class LeaveRequested:
    """To an agent: leave. Fields as in LeaveRequest."""

    reason: LeaveReason
    seconds: float | None
    detail: str


@dataclass(frozen=True, slots=True)
class LeaveAnswer:
    """To the sender: the nodes of the agents that the leader has told, in natural order, and those without an agent."""

    nodes: tuple[str, ...]
    unknown: tuple[str, ...]


def addressed_agents(request: LeaveRequest, agents: Mapping[str, str]) -> tuple[tuple[str, ...], LeaveAnswer]:
    """Find the agents that a request is about.

    Args:
        request: The request.
        agents: All agents that the leader knows, by identity, with their nodes.

    Returns:
        Their identities, without the one that asks, and the answer.
    """
    others = {agent: node for agent, node in agents.items() if agent != request.agent}
    of_job = {agent: node for agent, node in others.items() if not request.job or job_of(agent) == request.job}
    meant = {agent: node for agent, node in of_job.items() if not request.nodes or node in request.nodes}
    nodes = set(meant.values())
    answer = LeaveAnswer(
        nodes=tuple(sorted(nodes, key=natural_key)),
        unknown=tuple(node for node in request.nodes if node not in nodes),
    )
    return tuple(meant), answer
