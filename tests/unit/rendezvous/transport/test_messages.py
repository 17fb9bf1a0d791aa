from __future__ import annotations

import json

import pytest

from slurm_elastic.rendezvous.membership.agents import AgentInfo, LeaveReason, Reason, WorkerFailure
from slurm_elastic.rendezvous.membership.assignment import Place
from slurm_elastic.rendezvous.membership.events import (
    Closed,
    Connected,
    Ended,
    Finished,
    Held,
    Holding,
    Interrupted,
    Joined,
    Leaving,
    Left,
    Outcome,
    Ponged,
    Probed,
    Resigned,
    Stopping,
    Waiting,
    WorkerFailed,
)
from slurm_elastic.rendezvous.transport.messages import (
    REPORT_LIMIT,
    AgentMessage,
    Assignment,
    Heartbeat,
    LeaderMessage,
    LeaveAnswer,
    LeaveRequest,
    LeaveRequested,
    MessageError,
    StatusAnswer,
    StatusPart,
    StatusReport,
    StatusRequest,
    StatusRequested,
    Successor,
    decode_agent_message,
    decode_leader_message,
    encode,
)

A = "node1/7.0/42"
CANDIDATE = AgentInfo(A, "node1", 0, 4, "default", "node1", 30000)
FAILURE = WorkerFailure(A, "node1", 3, -9, "line 1\nline 2", "/run/error.json", "/run/stderr.log")

FROM_AGENTS: list[AgentMessage] = [
    Heartbeat(),
    Connected(A, None),
    Connected(CANDIDATE.agent, 3, over=True),
    Joined(CANDIDATE, 1),
    Joined(CANDIDATE, 3, 1, 2, cut_off=True),
    Ponged(A, 7),
    Leaving(A, LeaveReason.TIME_LIMIT, 119.5),
    Held(A, 3, 17),
    Held(A, 3, None),
    Left(A, LeaveReason.DRAINED, stopped=True),
    WorkerFailed(A, 3, FAILURE),
    Finished(A, 3),
    Closed(A),
    LeaveRequest(A, (), "7.0", LeaveReason.PREEMPTED, 14.5, "preempted"),
    StatusRequest(A),
    StatusReport(A, 3, '{"state":"training"}'),
]
FROM_LEADERS: list[LeaderMessage] = [
    Heartbeat(),
    Assignment(2, Place(A, "node1", 0, 4, 0, "default", 0, 8), 3, Reason.NODE_LOST, 2, 8, "node1", 30000, 1),
    Assignment(
        2,
        Place(A, "node1", 0, 4, 0, "default", 0, 8, "10.0.0.1", 31000),
        *(3, Reason.NODE_LOST, 2, 8, "node1", 30000, 1, 2, A, "node1"),
        (Successor("node2/7.0/43", "10.0.0.2", 31001),),
        "node[1-2]",
    ),
    Holding(3, leaving=(A,)),
    Stopping(3, 17, Reason.NODE_LEFT, "node1", "preempted", 25.0),
    Stopping(3, 17, Reason.NODE_JOINED, "node1, node2", "", None, leaving=(A,)),
    Interrupted(3, Reason.WORKER_FAILED, "node1", "rank 3: exit code 1", 2),
    Probed(7),
    Resigned(A, gone=("b", "c")),
    Waiting(),
    LeaveRequested(LeaveReason.CANCELLED, 4.5, "cancelled"),
    LeaveAnswer(("node1",), ("node7",)),
    StatusRequested(3),
    StatusPart(((A, '{"state":"training"}'),)),
    StatusAnswer(A, 2, "running", 12.5, 3, 2, "node3", 2, 4),
    Ended(Outcome.SUCCEEDED, None, ""),
    Ended(Outcome.FAILED, FAILURE, ""),
]


@pytest.mark.parametrize("message", FROM_AGENTS, ids=str)
def test_what_agents_say_arrives_as_it_was(message: AgentMessage) -> None:
    assert decode_agent_message(json.loads(encode(message)), A) == message


@pytest.mark.parametrize("message", FROM_LEADERS, ids=str)
def test_what_the_leader_says_arrives_as_it_was(message: LeaderMessage) -> None:
    assert decode_leader_message(json.loads(encode(message))) == message


def test_kinds_keep_their_names_on_the_wire() -> None:
    kinds = [json.loads(encode(message))["kind"] for message in FROM_LEADERS if isinstance(message, Assignment)]
    assert set(kinds) == {"Placed"}


def test_paths_and_words_that_are_no_utf_8_arrive() -> None:
    path = b"/run/caf\xe9".decode(errors="surrogateescape")
    failed = WorkerFailed(A, 0, WorkerFailure(A, "node1", 0, 1, f"no file {path}", path, path))
    assert decode_agent_message(json.loads(encode(failed)), A) == failed


def test_every_kind_is_tested() -> None:
    assert {type(message) for message in FROM_AGENTS} == set(AgentMessage.__args__)
    assert {type(message) for message in FROM_LEADERS} == set(LeaderMessage.__args__)


@pytest.mark.parametrize("message", FROM_AGENTS[1:], ids=str)
def test_nobody_speaks_for_another(message: AgentMessage) -> None:
    with pytest.raises(MessageError, match=r"node2/7\.0/1 speaks for node1/7\.0/42"):
        decode_agent_message(json.loads(encode(message)), "node2/7.0/1")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ({}, "unknown kind None"),
        ({"kind": "Beet"}, "unknown kind 'Beet'"),
        ({"kind": ["Heartbeat"]}, "unknown kind"),
        ({"kind": "Placed"}, "unknown kind 'Placed'"),
        ({"kind": "Finished", "agent": A}, "a Finished message that cannot be read.*round"),
        ({"kind": "Finished", "agent": A, "round": "3"}, "Expected `int`"),
        ({"kind": "Finished", "agent": A, "round": 3.5}, "Expected `int`"),
        ({"kind": "Finished", "agent": 1, "round": 3}, "Expected `str`"),
        ({"kind": "Leaving", "agent": A, "reason": "bored"}, "Invalid enum value"),
        ({"kind": "Joined", "candidate": {"agent": A}, "attempt": 1}, "node"),
        ({"kind": "Joined", "candidate": None, "attempt": 1}, "Expected `object`"),
    ],
)
def test_what_cannot_be_read_is_refused(content: dict[str, object], why: str) -> None:
    with pytest.raises(MessageError, match=why):
        decode_agent_message(content, A)


def test_a_leader_says_nothing_that_agents_say() -> None:
    with pytest.raises(MessageError, match="unknown kind 'Joined'"):
        decode_leader_message(json.loads(encode(Joined(CANDIDATE, 1))))


@pytest.mark.parametrize("report", ["x" * (REPORT_LIMIT + 1), "caf\u00e9", "a\nb"])
def test_a_report_that_is_too_long_or_no_printable_ascii_is_refused(report: str) -> None:
    with pytest.raises(MessageError, match="a report of"):
        decode_agent_message(json.loads(encode(StatusReport(A, 1, report))), A)
