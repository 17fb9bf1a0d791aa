from __future__ import annotations

from dataclasses import replace

import pytest

from slurm_elastic.rendezvous.membership.agents import AgentInfo, LeaveReason, Reason, WorkerFailure
from slurm_elastic.rendezvous.membership.assignment import Table, build_table
from slurm_elastic.rendezvous.membership.events import (
    Decision,
    Drop,
    Ended,
    Finish,
    Interrupt,
    Interrupted,
    Outcome,
    Probed,
    Publish,
    Resend,
    Retire,
    Send,
    Stopping,
    Waiting,
)
from slurm_elastic.rendezvous.run_events import Entry, describe


def told(decision: Decision) -> Entry:
    entry = describe(decision)
    assert entry is not None
    return entry


def table(nodes: int, *, workers: int = 1, reason: Reason = Reason.START, restarts: int = 0) -> Table:
    candidates = [
        AgentInfo(f"n{number}/7.0/1", f"n{number}", number, workers, "default", f"n{number}", 30000)
        for number in range(1, nodes + 1)
    ]
    return build_table(4, reason, candidates, restarts)


@pytest.mark.parametrize(
    ("decision", "line"),
    [
        (Publish(table(1), 0.123), "round 4 formed after start in 0.12 s: 1 node (n1), 1 worker"),
        (
            Publish(table(2, workers=4, reason=Reason.WORKER_FAILED, restarts=1), 2.0),
            "round 4 formed after worker failed in 2.00 s: 2 nodes (n1, n2), 8 workers, 1 restart charged",
        ),
        (
            Publish(table(9, reason=Reason.NODE_LOST, restarts=2), 0.0),
            "round 4 formed after node lost in 0.00 s: 9 nodes (n1, n2, n3, ... n9), 9 workers, 2 restarts charged",
        ),
        (
            Interrupt(("a",), Interrupted(4, Reason.NODE_LOST, "n2", "its connection broke")),
            "round 4 ends: node lost, n2 (its connection broke)",
        ),
        (Interrupt(("a",), Interrupted(4, Reason.NODE_JOINED, "n2, n3", "")), "round 4 ends: node joined, n2, n3"),
        (Interrupt(("a",), Interrupted(4, Reason.NODE_JOINED, "", "")), "round 4 ends: node joined"),
        (
            Interrupt(("a",), Interrupted(4, Reason.WORKER_FAILED, "n2", "with 3 nodes it failed"), unusable=3),
            "round 4 ends: with 3 nodes it failed",
        ),
        (
            Interrupt((), Interrupted(4, Reason.NODE_JOINED, "n2", ""), step=17),
            "round 4 ends after step 17: node joined, n2",
        ),
        (
            Send(("a",), Stopping(4, 17, Reason.NODE_JOINED, "n2", "", None)),
            "round 4 will end after step 17: node joined, n2",
        ),
        (
            Send(("a",), Stopping(4, 17, Reason.NODE_LEFT, "n1", "preempted", 24.9)),
            "round 4 will end after step 17: node left, n1 (preempted), within 25 s",
        ),
        (Retire("n2/7.0/1", "n2", LeaveReason.PREEMPTED), "n2 left: preempted"),
        (Send(("n3/7.0/1",), Waiting()), "n3 waits as a spare"),
        (Finish((), Ended(Outcome.SUCCEEDED, None, "")), "the run succeeded"),
        (
            Finish((), Ended(Outcome.TIMED_OUT, None, "1 of at least 2 nodes")),
            "the run was given up: 1 of at least 2 nodes",
        ),
        (Finish((), Ended(Outcome.CLOSED, None, "closed by n1/7.0/1")), "the run closed: closed by n1/7.0/1"),
    ],
)
def test_whole_lines(decision: Decision, line: str) -> None:
    assert told(decision).text == line


@pytest.mark.parametrize(
    "decision",
    [
        Send(("a",), Probed(1)),
        Resend("a", table(1)),
        Interrupt((), Interrupted(4, Reason.NODE_LEFT, "n2", "")),
        Interrupt(("a",), Interrupted(4, Reason.NODE_LOST, "n2", ""), on_record=True),
    ],
    ids=str,
)
def test_what_is_of_no_interest_to_a_person(decision: Decision) -> None:
    assert describe(decision) is None


def test_fields_for_programs() -> None:
    assert describe(Publish(table(2, workers=4), 0.12345)) == Entry(
        "round_formed",
        "round 4 formed after start in 0.12 s: 2 nodes (n1, n2), 8 workers",
        {"round": 4, "reason": "start", "nodes": ["n1", "n2"], "world_size": 8, "restarts": 0, "seconds": 0.1235},
    )
    assert describe(Drop("n2/7.0/1", "n2", "silent", 3.0404)) == Entry(
        "node_lost",
        "lost n2: silent, last sign of life 3.0 s ago",
        {"nodes": ["n2"], "why": "silent", "silent_for": 3.04},
    )
    assert describe(Interrupt(("n1/7.0/1",), Interrupted(4, Reason.NODE_LEFT, "n2, n4", "preempted"))) == Entry(
        "round_ended",
        "round 4 ends: node left, n2, n4 (preempted)",
        {"round": 4, "reason": "node_left", "nodes": ["n2", "n4"], "detail": "preempted"},
    )
    unusable = Interrupt(("a",), Interrupted(4, Reason.WORKER_FAILED, "n2", "it failed"), unusable=3)
    assert told(unusable).fields["unusable"] == 3
    nodes = ", ".join(f"n{i}" for i in range(2, 1002))
    many = Interrupt(("n1/7.0/1",), Interrupted(4, Reason.NODE_JOINED, nodes, ""))
    assert told(many).text == "round 4 ends: node joined, n2, n3, n4, ... n1001"
    assert describe(Finish((), Ended(Outcome.FAILED, WorkerFailure("n2/7.0/1", "n2", 3, 1), ""))) == Entry(
        "run_ended", "the run failed", {"outcome": "failed", "detail": "", "nodes": ["n2"], "rank": 3}
    )


def test_the_end_by_a_worker_says_why_it_failed() -> None:
    known = {"cause": "gpu_memory", "domain": "user_code", "outlook": "not_again"}
    failure = WorkerFailure("n2/7.0/1", "n2", 3, 1, "it failed", **known, detail="process 7 has 3 GiB")
    why = "; out of GPU memory (user code), a restart will not help; process 7 has 3 GiB"
    ended = told(Interrupt(("a",), Interrupted(4, Reason.WORKER_FAILED, "n2", "rank 3: it failed"), failure=failure))
    assert ended.text == f"round 4 ends: worker failed, n2 (rank 3: it failed){why}"
    assert {name: ended.fields[name] for name in ("rank", *known)} == {"rank": 3, **known}
    waited = replace(failure, stragglers=((1, "n1"),))
    ended = told(Interrupt(("a",), Interrupted(4, Reason.WORKER_FAILED, "n2", ""), failure=waited))
    assert ended.fields["stragglers"] == [{"rank": 1, "node": "n1"}]
    finished = told(Finish((), Ended(Outcome.FAILED, failure, "")))
    assert finished.text == f"the run failed{why}"
    assert {name: finished.fields[name] for name in ("rank", *known)} == {"rank": 3, **known}
