"""Asking a run what it does now: the leader asks each of its agents once, and passes on what they report.

A report is text to the leader, so that what agents say about themselves can grow without it.
"""

from __future__ import annotations

from dataclasses import dataclass

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
