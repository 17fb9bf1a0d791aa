"""Scenarios: their text, what they need, and mistakes in them."""

from __future__ import annotations

import pytest

from slurm_elastic.errors import UsageError
from slurm_elastic.rehearsal import fail, hang, join, kill, leader, pause, preempt, timelimit
from slurm_elastic.rehearsal.scenario import Kind, parse_kinds, parse_scenario, plan, spread


def test_sentences_become_mishaps() -> None:
    text = """
    # a week on the cluster
    at step 30 preempt node 2 with 20 s; at step 80 kill node 0
    At step 90  join          # it comes back
    at step 95 leader
    at step 97 fail node 1
    at step 99 time limit with 60 seconds
    at step 100 pause; at step 101 hang node 1
    """
    mishaps = (
        preempt(node=2, step=30, seconds=20),
        kill(node=0, step=80),
        join(step=90),
        leader(step=95),
        fail(node=1, step=97),
        timelimit(step=99, seconds=60),
        pause(step=100),
        hang(node=1, step=101),
    )
    assert parse_scenario(text) == parse_scenario("; ".join(map(str, mishaps))) == mishaps


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "has no mishap; write it as in"),
        ("kill node 1", "not understood; write it as in: at step 30 preempt node 2 with 20 s"),
        ("at step 5 kil node 1", "no mishap 'kil'; did you mean kill?"),
        ("at step 5 kill", "which is not understood; write it as in: at step 30 kill node 2"),
        ("at step 5 join node 1", "write it as in: at step 30 join"),
        ("at step 5 kill node 1 with 3 s", "write it as in: at step 30 kill node 2"),
        ("at step 5 kill node 2", "that node is not there; nodes are counted from 0, and there are 0, 1 then"),
        ("at step 5 kill node 1; at step 9 fail node 1", "there are 0 then"),
        ("at step 5 kill node 1; at step 9 kill node 0", "takes the last node; give --nodes 3 or more"),
        ("at step 5 pause", "there are 2; give --nodes 3 or more"),
        ("at step 5 kill node 1; at step 5 join", "two mishaps at step 5"),
        ("at step 0 join", "give step 1 or more"),
    ],
)
def test_a_scenario_that_cannot_be_is_one_line(text: str, line: str) -> None:
    with pytest.raises(UsageError, match=line):
        plan(parse_scenario(text), 2)


def test_a_plan_is_in_the_order_of_steps_and_knows_how_many_nodes_there_will_be() -> None:
    found = plan([join(step=9), join(step=5), kill(node=0, step=7)], 2)
    assert [each.step for each in found.mishaps] == [5, 7, 9]
    assert found.most == 3
    # The node that joins last is the one that was killed.
    assert plan([kill(node=0, step=1), join(step=2), preempt(node=0, step=3)], 2).most == 2


def test_an_agent_is_told_the_notice_of_its_first_preemption() -> None:
    found = plan([preempt(node=1, step=5, seconds=7), join(step=6), preempt(node=2, step=8)], 3)
    assert [found.seconds(Kind.PREEMPT, node) for node in range(3)] == [None, 7, 30]


def test_kinds_are_spread_over_the_training_and_take_nodes_that_are_there() -> None:
    kinds = parse_kinds("preempt, kill,join,leader")
    found = spread(kinds, 3, 100)
    assert [(each.kind, each.step, each.node) for each in found] == [
        (Kind.PREEMPT, 20, 2),
        (Kind.KILL, 40, 1),
        (Kind.JOIN, 60, None),
        (Kind.LEADER, 80, None),
    ]
    plan(found, 3)
    with pytest.raises(UsageError, match="no mishap 'meteor'; there are kill"):
        parse_kinds("meteor")
