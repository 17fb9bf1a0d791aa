"""Requests to the leader that concern no round: that agents leave, and what each of them does now.

The leader passes both on; an agent that is asked to leave announces that as for a signal.
"""

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


# Asking a run what it does now: the leader asks each of its agents once, and passes on what they report.
#
# A report is text to the leader, so that what agents say about themselves can grow without it.
REPORT_LIMIT = 4096
"""Characters of one agent's report. They are printable ASCII, so that JSON needs at most twice as many bytes."""


@dataclass(frozen=True, slots=True)
class StatusRequest:
    """To the leader: report what all agents do now. `agent` is the one that asks, and need not be a member."""

    agent: str


@dataclass(frozen=True, slots=True)
class StatusRequested:
    """To an agent: report what you do now, under this number."""

    request: int


@dataclass(frozen=True, slots=True)
class StatusReport:
    """To the leader: what an agent does now, as JSON that docs/events.md describes."""

    agent: str
    request: int
    report: str


@dataclass(frozen=True, slots=True)
class StatusPart:
    """To the client that asked: reports of some agents, with their identities."""

    reports: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class StatusAnswer:
    """To the client that asked, after all parts: the leader's own knowledge.

    Attributes:
        leader: the leader's agent.
        epoch: of the leader.
        phase: ``forming`` while no round runs, ``running``, or ``closed`` when the run has ended.
        seconds: since this phase began.
        asked, answered: how many agents the leader has asked, and how many have reported in time.
        silent: nodes of the other agents, as a host list.
        min_nodes, max_nodes: of the run.
        busy: true if too many clients ask; then no agent was asked.
    """

    leader: str
    epoch: int
    phase: str
    seconds: float
    asked: int
    answered: int
    silent: str = ""
    min_nodes: int = 0
    max_nodes: int = 0
    busy: bool = False


def is_report(text: str) -> bool:
    """Return whether the leader passes this on."""
    return len(text) <= REPORT_LIMIT and text.isascii() and text.isprintable()
