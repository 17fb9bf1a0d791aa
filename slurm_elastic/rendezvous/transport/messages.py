"""The messages between agents and the leader, as JSON.

Most messages are the membership machine's own: what agents send are its events, and its decisions carry what the leader
sends. The others are defined here and beside their subjects. A message is a JSON object with the key ``kind`` and the
fields of the class of that kind, checked against their types when read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

import msgspec

from slurm_elastic import typed_json
from slurm_elastic.rendezvous.election.policy import Successor
from slurm_elastic.rendezvous.membership import (
    Ended,
    Holding,
    Interrupted,
    Joined,
    MemberMessage,
    MembershipMessage,
    Place,
    Probed,
    Reason,
    Resigned,
    Stopping,
    Waiting,
)
from slurm_elastic.rendezvous.requests import (
    LeaveAnswer,
    LeaveRequest,
    LeaveRequested,
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
    "Heartbeat",
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
class Heartbeat:
    """A heartbeat. The leader sends it three times in the heartbeat limit, and every agent answers with its own.

    Attributes:
        heartbeat_limit: The limit in force, in seconds, from the leader; 0 in an agent's answer.
    """

    heartbeat_limit: float = 0.0


@dataclass(frozen=True, slots=True)
class Assignment:
    """A place in a round: all that an agent needs to start its workers, and to find or be the next leader.

    Fields as in Place and Table, and besides:

    Attributes:
        epoch: The leader's epoch.
        leader: The leader's agent.
        leader_node: The leader's node.
        successors: The first of the agents that may follow the leader, in order.
        members: The nodes of the round as a host list, which is short also for thousands.
        heartbeat_limit: The limit in force, in seconds.
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
LeaderMessage = (
    Heartbeat
    | Assignment
    | MembershipMessage
    | LeaveRequested
    | LeaveAnswer
    | StatusRequested
    | StatusPart
    | StatusAnswer
)

_OLDER_KINDS: dict[type, str] = {Assignment: "Placed", Heartbeat: "Beat"}
"""Kinds that have another name on the wire than their class."""


def _kind(message: type) -> str:
    return _OLDER_KINDS.get(message, message.__name__)


_AGENT_KINDS: dict[str, type] = {_kind(message): message for message in get_args(AgentMessage)}
_LEADER_KINDS: dict[str, type] = {_kind(message): message for message in get_args(LeaderMessage)}


def encode(message: AgentMessage | LeaderMessage) -> bytes:
    """Return a message as JSON.

    msgspec's own encoder refuses the surrogates that stand in paths and in the last lines of a worker for bytes that
    are no UTF-8 (PEP 383); json.dumps escapes them.
    """
    try:
        content = msgspec.json.encode(message)
    except UnicodeEncodeError:
        content = json.dumps(msgspec.to_builtins(message), separators=(",", ":")).encode()
    return b'{"kind":"%s"%s%s' % (_kind(type(message)).encode(), b"," if len(content) > 2 else b"", content[1:])


def decode_agent_message(content: Mapping[str, Any], agent: str) -> AgentMessage:
    """Return the message of an agent.

    Args:
        content: The JSON object.
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
