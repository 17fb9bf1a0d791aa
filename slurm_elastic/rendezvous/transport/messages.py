"""The messages between agents and the leader, as JSON.

Most messages are the membership machine's own: what agents send are its events, and its decisions carry what the leader
sends. The others are defined here: assignments, heartbeats, and requests that concern no round. The leader passes those
on; an agent that is asked to leave announces that as for a signal. A message is a JSON object with the key ``kind`` and
the fields of the class of that kind, checked against their types when read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

import msgspec

from slurm_elastic import typed_json
from slurm_elastic.rendezvous.membership.agents import LeaveReason, Reason, job_of
from slurm_elastic.rendezvous.membership.assignment import Place
from slurm_elastic.rendezvous.membership.events import Joined, MemberMessage, MembershipMessage
from slurm_elastic.slurm import natural_key

Endpoint = tuple[str, int]
"""Address or name, and port."""

INVENTORY_LIMIT = 4096
"""Characters of an inventory: a leader keeps those of all agents."""


class MessageError(Exception):
    """An authenticated message that this version cannot read; it is dropped and counted."""


@dataclass(frozen=True, slots=True)
class LeaveRequest:
    """To the leader: these agents have to leave.

    Attributes:
        nodes: Nodes of the agents; empty for all.
        job: Job of the agents, as in `job_of`; empty for every job of the run.
        seconds: Seconds from now until they have to have left; None without a limit.
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
    """Return which of these agents, with their nodes, a request is about, without the one that asks; and its answer."""
    others = {agent: node for agent, node in agents.items() if agent != request.agent}
    of_job = {agent: node for agent, node in others.items() if not request.job or job_of(agent) == request.job}
    meant = {agent: node for agent, node in of_job.items() if not request.nodes or node in request.nodes}
    nodes = set(meant.values())
    answer = LeaveAnswer(
        nodes=tuple(sorted(nodes, key=natural_key)),
        unknown=tuple(node for node in request.nodes if node not in nodes),
    )
    return tuple(meant), answer


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
        phase: ``forming`` while no round runs, ``running``, or ``closed`` when the run has ended.
        seconds: since this phase began.
        asked, answered: how many agents the leader has asked, and how many have reported in time.
        silent: nodes of the other agents, as a host list.
        busy: true if too many clients ask; then no agent was asked.
    """

    leader: str
    epoch: int
    phase: str
    seconds: float
    asked: int = 0
    answered: int = 0
    silent: str = ""
    min_nodes: int = 0
    max_nodes: int = 0
    busy: bool = False


def is_report(text: str) -> bool:
    """Return whether the leader passes this on."""
    return len(text) <= REPORT_LIMIT and text.isascii() and text.isprintable()


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A heartbeat. The leader sends it three times in the heartbeat limit, and every agent answers with its own.

    Attributes:
        heartbeat_limit: The limit in force, in seconds, from the leader; 0 in an agent's answer.
    """

    heartbeat_limit: float = 0.0


@dataclass(frozen=True, slots=True)
class Successor:
    """A member of the last round, and where it listens when it campaigns."""

    agent: str
    address: str
    port: int

    @property
    def endpoint(self) -> Endpoint:
        """Return address and port."""
        return self.address, self.port


@dataclass(frozen=True, slots=True)
class Assignment:
    """A place in a round: all that an agent needs to start its workers, and to find or be the next leader.

    Fields as in Place and Table, and besides:

    Attributes:
        successors: The first of the agents that may follow the leader, in order.
        members: The nodes of the round as a host list, which is short also for thousands.
        origin: The snapshot that the workers start from, as text; membership does not read it.
    """

    attempt: int
    place: Place
    round: int
    reason: Reason
    nodes: int
    world_size: int
    store_address: str
    store_port: int
    restarts: int
    epoch: int = 0
    leader: str = ""
    leader_node: str = ""
    successors: tuple[Successor, ...] = ()
    members: str = ""
    heartbeat_limit: float = 0.0
    origin: str = ""


AgentMessage = Heartbeat | MemberMessage | LeaveRequest | StatusRequest | StatusReport
ClientAnswer = LeaveAnswer | StatusPart | StatusAnswer
LeaderMessage = Heartbeat | Assignment | MembershipMessage | LeaveRequested | StatusRequested | ClientAnswer

_AGENT_KINDS: dict[str, type] = {message.__name__: message for message in get_args(AgentMessage)}
_LEADER_KINDS: dict[str, type] = {message.__name__: message for message in get_args(LeaderMessage)}


def encode(message: AgentMessage | LeaderMessage) -> bytes:
    """Return a message as JSON.

    msgspec's own encoder refuses the surrogates that stand in paths and in the last lines of a worker for bytes that
    are no UTF-8 (PEP 383); json.dumps escapes them.
    """
    try:
        content = msgspec.json.encode(message)
    except UnicodeEncodeError:
        content = json.dumps(msgspec.to_builtins(message), separators=(",", ":")).encode()
    return b'{"kind":"%s"%s%s' % (type(message).__name__.encode(), b"," if len(content) > 2 else b"", content[1:])


def decode_agent_message(content: Mapping[str, Any], agent: str) -> AgentMessage:
    """Return the message of an agent.

    Args:
        agent: The identity that the connection has proved; a message in the name of another agent is refused.

    Raises:
        MessageError: Unknown kind, missing or mistyped fields, another agent's name, a long inventory, or
            a report that is too long or no text.
    """
    message: AgentMessage = _decode(content, _AGENT_KINDS)
    if isinstance(message, Heartbeat):
        return message
    if isinstance(message, Joined) and len(message.candidate.inventory) > INVENTORY_LIMIT:
        raise MessageError(f"an inventory of {len(message.candidate.inventory)} characters")
    if isinstance(message, StatusReport) and not is_report(message.report):
        raise MessageError(f"a report of {len(message.report)} characters that is too long, or no printable ASCII")
    name = message.candidate.agent if isinstance(message, Joined) else message.agent
    if name != agent:
        raise MessageError(f"{agent} speaks for {name}")
    return message


def decode_leader_message(content: Mapping[str, Any]) -> LeaderMessage:
    """Return the message of the leader.

    Raises:
        MessageError: Unknown kind, missing or mistyped fields.
    """
    message: LeaderMessage = _decode(content, _LEADER_KINDS)
    return message


def _decode(content: Mapping[str, Any], kinds: Mapping[str, type]) -> Any:
    fields = dict(content)
    kind = fields.pop("kind", None)
    if not isinstance(kind, str) or kind not in kinds:
        # Not as it is: it may be long, and nested more deeply than repr() can write.
        raise MessageError(f"a message of unknown kind {type(kind) if isinstance(kind, list | dict) else kind!r:.60}")
    try:
        return typed_json.convert(fields, kinds[kind])
    except typed_json.JSONError as error:
        raise MessageError(f"a {kind} message that cannot be read: {error}") from None
