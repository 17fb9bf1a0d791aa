"""What a person reads of the life of a run: the events as the leader describes them, and the lines."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from slurm_elastic.agent.event_log import FactLines, Reached
from slurm_elastic.rendezvous.membership.agents import AgentInfo, LeaveReason, Reason, WorkerFailure
from slurm_elastic.rendezvous.membership.assignment import build_table
from slurm_elastic.rendezvous.membership.events import (
    Decision,
    Drop,
    Ended,
    Finish,
    Interrupt,
    Interrupted,
    Outcome,
    Publish,
    Retire,
)
from slurm_elastic.rendezvous.run_events import describe

FOUR = [1, 2, 3, 4]


def formed(number: int, reason: Reason, nodes: Iterable[int], restarts: int = 0) -> Decision:
    candidates = [AgentInfo(f"n{n}/7.0/1", f"n{n}", n, 1, "default", f"n{n}", 30000) for n in nodes]
    return Publish(build_table(number, reason, candidates, restarts), 0.07)


def over(reason: Reason, nodes: str, detail: str = "", step: int | None = None) -> Decision:
    return Interrupt(("n1/7.0/1",), Interrupted(0, reason, nodes, detail), step=step)


def lines(reached: Reached, *decisions: Decision, origin: int | None = None) -> list[str]:
    facts = FactLines("7", 3, lambda: reached)
    entries = [entry for decision in decisions if (entry := describe(decision)) is not None]
    return [line for entry in entries for line in facts.tell(entry, origin)] + list(facts.rest())


def lost(number: int, why: str = "its connection broke") -> Decision:
    return Drop(f"n{number}/7.0/1", f"n{number}", why, 0.3)


def left(number: int, why: LeaveReason) -> Decision:
    return Retire(f"n{number}/7.0/1", f"n{number}", why)


AT_152 = Reached(152, 140, 4)
SAVED = Reached(400, 400, 4)
LOSS = (lost(3), over(Reason.NODE_LOST, "n3", "its connection broke"), formed(1, Reason.NODE_LOST, [1, 2, 4]))
PREEMPTED, DRAINED = LeaveReason.PREEMPTED, LeaveReason.DRAINED


ALL = "n1, n2, n3, n4"


@pytest.mark.parametrize(
    ("reached", "decisions", "line"),
    [
        (AT_152, [formed(0, Reason.START, FOUR)], "run 7 starts: 4 nodes (n1, n2, n3, n4), 4 workers"),
        (AT_152, [formed(0, Reason.REQUEUED, [1, 2])], "run 7 goes on: 2 nodes (n1, n2), 2 workers"),
        (AT_152, LOSS, "n3 lost (its connection broke): 3 of 4 nodes go on from step 140, 12 steps again"),
        # Before a checkpoint, of a script without steps, and where too few nodes are left.
        (Reached(152, None, 4), LOSS, "n3 lost (its connection broke): 3 of 4 nodes go on, which had come to step 152"),
        (Reached(), LOSS, "n3 lost (its connection broke): 3 nodes go on"),
        (AT_152, LOSS[:2], "n3 lost (its connection broke): after step 152"),
        (
            SAVED,
            [left(4, DRAINED), over(Reason.NODE_LEFT, "n4", "drained", 250), formed(1, Reason.NODE_LEFT, [1, 2, 3])],
            "n4 drained: all saved step 400, 3 of 4 nodes go on",
        ),
        (
            SAVED,
            [over(Reason.NODE_JOINED, "n5", "", 250), formed(1, Reason.NODE_JOINED, [*FOUR, 5])],
            "n5 joined: all saved step 400, 5 nodes go on",
        ),
        (
            SAVED,
            [over(Reason.NODE_LEFT, ALL, "preempted", 250), *(left(number, PREEMPTED) for number in FOUR)],
            "all 4 nodes preempted: all saved step 400",
        ),
        (
            AT_152,
            [*(left(number, LeaveReason.CANCELLED) for number in FOUR), over(Reason.NODE_LEFT, ALL, "cancelled")],
            "all 4 nodes cancelled: after step 152",
        ),
        (
            SAVED,
            [over(Reason.NODE_LEFT, ALL, "time_limit", 9)],
            "all 4 nodes at the time limit: all saved step 400",
        ),
        (
            AT_152,
            [over(Reason.WORKER_FAILED, "n2", "rank 1: ValueError: bad"), formed(1, Reason.WORKER_FAILED, FOUR, 1)],
            "rank 1 on n2 failed: ValueError: bad: 4 nodes go on from step 140, 12 steps again, 1 of 3 restarts used",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_one_fact_is_one_line(reached: Reached, decisions: list[Decision], line: str) -> None:
    rounds = [decision.table.round for decision in decisions if isinstance(decision, Publish)]
    assert lines(reached, *decisions) == [line + "".join(f" [round {number} in 0.07 s]" for number in rounds)]


def test_fifty_nodes_of_five_hundred_that_are_lost_or_preempted_at_once_are_one_line() -> None:
    gone, rest, all_ = range(101, 151), [n for n in range(1, 501) if not 101 <= n < 151], Reached(152, 140, 500)
    first = over(Reason.NODE_LOST, "n101", "its connection broke")
    assert lines(all_, lost(101), first, *map(lost, gone[1:]), formed(1, Reason.NODE_LOST, rest)) == [
        "50 nodes lost (n101, n102, ... n150; their connection broke): 450 of 500 nodes go on from step 140, 12 steps "
        "again [round 1 in 0.07 s]"
    ]
    leaves = [left(number, PREEMPTED) for number in gone]
    end = over(Reason.NODE_LEFT, ", ".join(f"n{number}" for number in gone), "preempted", 250)
    assert lines(Reached(400, 400, 500), *leaves, end, formed(1, Reason.NODE_LEFT, rest)) == [
        "50 nodes preempted (n101, n102, ... n150): all saved step 400, 450 of 500 nodes go on [round 1 in 0.07 s]"
    ]


def test_the_step_of_the_snapshot_is_that_from_which_they_go_on() -> None:
    (line,) = lines(AT_152, *LOSS, origin=150)
    assert line.endswith("3 of 4 nodes go on from step 150, 2 steps again [round 1 in 0.07 s]")


def test_the_end_has_a_line_of_its_own_only_where_no_root_cause_is_told() -> None:
    leaves = left(4, LeaveReason.FINISHED)
    assert lines(SAVED, Finish((), Ended(Outcome.SUCCEEDED, None, "")), leaves) == []
    failure = WorkerFailure("n2/7.0/1", "n2", 3, 1)
    assert lines(SAVED, Finish((), Ended(Outcome.FAILED, failure, "no restart is left"))) == []
    assert lines(SAVED, Finish((), Ended(Outcome.FAILED, None, "no node"))) == ["the run failed: no node"]
