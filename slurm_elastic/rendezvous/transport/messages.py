"""The messages between agents and the leader, as JSON.

An agent's words are the membership machine's own events; the leader's words are defined here. A message is a JSON
object with the key ``kind`` and the fields of the class of that kind, checked against their types when read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

import msgspec

from slurm_elastic.rendezvous.election.policy import Successor
from slurm_elastic.rendezvous.leave_requests import LeaveAnswer, LeaveRequest, LeaveRequested
from slurm_elastic.rendezvous.membership import (
    Closed,
    Connected,
    Finished,
    Held,
    Joined,
    Leaving,
    Left,
    Outcome,
    Place,
    Ponged,
    Reason,
    WorkerFailed,
    WorkerFailure,
)
from slurm_elastic.rendezvous.status_requests import (
    StatusAnswer,
    StatusPart,
    StatusReport,
    StatusRequest,
    StatusRequested,
    is_report,
)

__all__ = [
    "INVENTORY_LIMIT",
    "AgentMessage",
    "Assignment",
    "Beat",
    "Ended",
    "Holding",
    "Interrupted",
    "LeaderMessage",
    "MessageError",
    "Probed",
    "Resigned",
    "Stopping",
    "Waiting",
    "decode_agent_message",
    "decode_leader_message",
    "encode",
]

INVENTORY_LIMIT = 4096
"""Characters of an inventory: a leader keeps those of all agents."""


class MessageError(Exception):
    """An authenticated message that this version cannot read; it is dropped and counted."""


@dataclass(frozen=True, slots=True)
class Beat:
    """A sign of life. The leader gives it three times in the heartbeat limit, and every agent answers with its own.

    `heartbeat_limit` is the one in force, as the leader says; 0 in an agent's own.
    """

    heartbeat_limit: float = 0.0


@dataclass(frozen=True, slots=True)
class Assignment:
    """A place in a round: all that an agent needs to start its workers, and to find or be the next leader.

    Fields as in Place and Table, and beside them the leader's epoch, its agent and node, and the first of those that
    may follow it. `members` are the nodes of the round as a host list, which is short also for thousands.
    `store_clients` is told the agent of rank 0 alone: the addresses of all nodes of the round; none if any is unknown.
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
    store_clients: tuple[str, ...] = ()
    origin: str = ""


@dataclass(frozen=True, slots=True)
class Interrupted:
    """This round is over: stop its workers and join again. `restarts` are the worker failures charged so far."""

    round: int
    reason: Reason
    node: str
    detail: str
    restarts: int = 0


@dataclass(frozen=True, slots=True)
class Holding:
    """This round ends as planned: say at which step its workers here can stop. They go no further until told.

    `leaving` are the agents that have said that they go, and will not lead.
    """

    round: int
    leaving: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Stopping:
    """The workers of this round stop by themselves at this step; then join again, or go if that was announced.

    `reason`, `node` and `detail` say why; `seconds` is the time for it, None for as much as wanted. `leaving` as in
    Holding.
    """

    round: int
    step: int
    reason: Reason
    node: str
    detail: str
    seconds: float | None
    leaving: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Probed:
    """Answer at once."""

    probe: int


@dataclass(frozen=True, slots=True)
class Waiting:
    """You are above the maximum; wait as a spare."""


@dataclass(frozen=True, slots=True)
class Resigned:
    """This agent led until now, and goes; nobody has workers. Somebody else has to lead.

    `gone` are members of the last round that are gone for good.
    """

    agent: str
    gone: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Ended:
    """The run has ended for everybody."""

    outcome: Outcome
    failure: WorkerFailure | None
    detail: str


AgentMessage = (
    Beat
    | Connected
    | Joined
    | Ponged
    | Leaving
    | Held
    | Left
    | WorkerFailed
    | Finished
    | Closed
    | LeaveRequest
    | StatusRequest
    | StatusReport
)
LeaderMessage = (
    Beat
    | Assignment
    | Holding
    | Stopping
    | Interrupted
    | Probed
    | Waiting
    | Resigned
    | Ended
    | LeaveRequested
    | LeaveAnswer
    | StatusRequested
    | StatusPart
    | StatusAnswer
)

_OLDER_KINDS: dict[type, str] = {Assignment: "Placed"}
"""Kinds that have another name on the wire than their class."""


def _kind(message: type) -> str:
    return _OLDER_KINDS.get(message, message.__name__)


_AGENT_KINDS: dict[str, type] = {_kind(message): message for message in get_args(AgentMessage)}
_LEADER_KINDS: dict[str, type] = {_kind(message): message for message in get_args(LeaderMessage)}


def encode(message: AgentMessage | LeaderMessage) -> bytes:
    """One message as JSON.

    msgspec's own encoder refuses what paths and last words may hold, surrogates for bytes that are no UTF-8 (PEP 383):
    those go in ASCII.
    """
    try:
        content = msgspec.json.encode(message)
    except UnicodeEncodeError:
        content = json.dumps(msgspec.to_builtins(message), separators=(",", ":")).encode()
    return b'{"kind":"%s"%s%s' % (_kind(type(message)).encode(), b"," if len(content) > 2 else b"", content[1:])


def decode_agent_message(content: Mapping[str, Any], agent: str) -> AgentMessage:
    """Read what an agent said.

    Args:
        content: the JSON object.
        agent: the identity that the connection has proved; a message in another's name is refused.

    Raises:
        MessageError: unknown kind, missing or mistyped fields, another agent's name, a long inventory, or
            a report that is too long or no text.
    """
    message: AgentMessage = _decode(content, _AGENT_KINDS)
    if isinstance(message, Beat):
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
    """Read what the leader said.

    Raises:
        MessageError: unknown kind, missing or mistyped fields.
    """
    message: LeaderMessage = _decode(content, _LEADER_KINDS)
    return message


def _decode(content: Mapping[str, Any], kinds: Mapping[str, type]) -> Any:
    fields = dict(content)
    kind = fields.pop("kind", None)
    if not isinstance(kind, str) or kind not in kinds:
        raise MessageError(f"a message of unknown kind {kind!r}")
    try:
        return msgspec.convert(fields, kinds[kind])
    except msgspec.ValidationError as error:
        raise MessageError(f"a {kind} message that cannot be read: {error}") from None
