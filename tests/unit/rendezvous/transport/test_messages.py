from __future__ import annotations

import json

import pytest

from slurm_elastic.rendezvous.membership import events
from slurm_elastic.rendezvous.membership.agents import AgentInfo, LeaveReason, Reason, WorkerFailure
from slurm_elastic.rendezvous.membership.assignment import Place
from slurm_elastic.rendezvous.transport import messages

A = "node1/7.0/42"
CANDIDATE = AgentInfo(A, "node1", 0, 4, "default", "node1", 30000)
FAILURE = WorkerFailure(A, "node1", 3, -9, "line 1\nline 2", "/run/error.json", "/run/stderr.log")

FROM_AGENTS: list[messages.AgentMessage] = [
    messages.Heartbeat(),
    events.Connected(A, None),
    events.Connected(CANDIDATE.agent, 3, over=True),
    events.Joined(CANDIDATE, 1),
    events.Joined(CANDIDATE, 3, 1, 2, cut_off=True),
    events.Ponged(A, 7),
    events.Leaving(A, LeaveReason.TIME_LIMIT, 119.5),
    events.Held(A, 3, 17),
    events.Held(A, 3, None),
    events.Left(A, LeaveReason.DRAINED, stopped=True),
    events.WorkerFailed(A, 3, FAILURE),
    events.Finished(A, 3),
    events.Closed(A),
    messages.LeaveRequest(A, (), "7.0", LeaveReason.PREEMPTED, 14.5, "preempted"),
    messages.StatusRequest(A),
    messages.StatusReport(A, 3, '{"state":"training"}'),
]
FROM_LEADERS: list[messages.LeaderMessage] = [
    messages.Heartbeat(),
    messages.Assignment(2, Place(A, "node1", 0, 4, 0, "default", 0, 8), 3, Reason.NODE_LOST, 2, 8, "node1", 30000, 1),
    messages.Assignment(
        2,
        Place(A, "node1", 0, 4, 0, "default", 0, 8, "10.0.0.1", 31000),
        *(3, Reason.NODE_LOST, 2, 8, "node1", 30000, 1, 2, A, "node1"),
        (messages.Successor("node2/7.0/43", "10.0.0.2", 31001),),
        "node[1-2]",
    ),
    events.Holding(3, leaving=(A,)),
    events.Stopping(3, 17, Reason.NODE_LEFT, "node1", "preempted", 25.0),
    events.Stopping(3, 17, Reason.NODE_JOINED, "node1, node2", "", None, leaving=(A,)),
    events.Interrupted(3, Reason.WORKER_FAILED, "node1", "rank 3: exit code 1", 2),
    events.Probed(7),
    events.Resigned(A, gone=("b", "c")),
    events.Waiting(),
    messages.LeaveRequested(LeaveReason.CANCELLED, 4.5, "cancelled"),
    messages.LeaveAnswer(("node1",), ("node7",)),
    messages.StatusRequested(3),
    messages.StatusPart(((A, '{"state":"training"}'),)),
    messages.StatusAnswer(A, 2, "running", 12.5, 3, 2, "node3", 2, 4),
    events.Ended(events.Outcome.SUCCEEDED, None, ""),
    events.Ended(events.Outcome.FAILED, FAILURE, ""),
]


@pytest.mark.parametrize("message", FROM_AGENTS, ids=str)
def test_what_agents_say_arrives_as_it_was(message: messages.AgentMessage) -> None:
    assert messages.decode_agent_message(json.loads(messages.encode(message)), A) == message


@pytest.mark.parametrize("message", FROM_LEADERS, ids=str)
def test_what_the_leader_says_arrives_as_it_was(message: messages.LeaderMessage) -> None:
    assert messages.decode_leader_message(json.loads(messages.encode(message))) == message


def test_paths_and_words_that_are_no_utf_8_arrive() -> None:
    path = b"/run/caf\xe9".decode(errors="surrogateescape")
    failed = events.WorkerFailed(A, 0, WorkerFailure(A, "node1", 0, 1, f"no file {path}", path, path))
    assert messages.decode_agent_message(json.loads(messages.encode(failed)), A) == failed


def test_every_kind_is_tested() -> None:
    assert {type(message) for message in FROM_AGENTS} == set(messages.AgentMessage.__args__)
    assert {type(message) for message in FROM_LEADERS} == set(messages.LeaderMessage.__args__)


@pytest.mark.parametrize("message", FROM_AGENTS[1:], ids=str)
def test_no_agent_speaks_for_another(message: messages.AgentMessage) -> None:
    with pytest.raises(messages.MessageError, match=r"node2/7\.0/1 speaks for node1/7\.0/42"):
        messages.decode_agent_message(json.loads(messages.encode(message)), "node2/7.0/1")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ({}, "unknown kind None"),
        ({"kind": "Beet"}, "unknown kind 'Beet'"),
        ({"kind": ["Heartbeat"]}, "unknown kind"),
        ({"kind": "Assignment"}, "unknown kind 'Assignment'"),
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
    with pytest.raises(messages.MessageError, match=why):
        messages.decode_agent_message(content, A)


def test_a_leader_says_nothing_that_agents_say() -> None:
    with pytest.raises(messages.MessageError, match="unknown kind 'Joined'"):
        messages.decode_leader_message(json.loads(messages.encode(events.Joined(CANDIDATE, 1))))


@pytest.mark.parametrize("report", ["x" * (messages.REPORT_LIMIT + 1), "caf\u00e9", "a\nb"])
def test_a_report_that_is_too_long_or_no_printable_ascii_is_refused(report: str) -> None:
    with pytest.raises(messages.MessageError, match="a report of"):
        messages.decode_agent_message(json.loads(messages.encode(messages.StatusReport(A, 1, report))), A)
