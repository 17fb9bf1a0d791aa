"""The choice of the step that becomes safe next."""

from __future__ import annotations

from dataclasses import replace

from slurm_elastic.snapshot.lineage import Holder, Protection, SnapshotId, slot_to_write
from slurm_elastic.snapshot.replication import (
    Goal,
    Report,
    kept_step,
    link_problem,
    next_goal,
    partners,
)


def report(node: str = "a", newest: int | None = 7, **more: object) -> Report:
    return replace(Report(node, Holder(node, 1), newest), **more)  # type: ignore[arg-type]


def test_the_step_to_take_is_ahead_of_all() -> None:
    assert next_goal(Goal(), {0: report(newest=7), 1: report(newest=9)}, 2) == Goal(10)
    assert next_goal(Goal(), {0: report(newest=7)}, 2) == Goal()
    assert next_goal(Goal(), {0: report(newest=7), 1: report(newest=None)}, 2) == Goal()


def test_a_step_that_all_have_copied_is_safe() -> None:
    goal = Goal(10, 5)
    done = report(newest=12, take=10, kept=10, copied=10)
    for waiting in (
        replace(done, copied=5),
        replace(done, kept=None),
        # Of the step before: it does not know of this one yet.
        replace(done, take=5, kept=10),
    ):
        assert next_goal(goal, {0: done, 1: waiting}, 2) == goal
    assert next_goal(goal, {0: done, 1: done}, 2) == Goal(13, 10)
    assert next_goal(goal, {0: done}, 2) == goal


def test_no_step_is_taken_while_one_agent_pauses() -> None:
    done = report(newest=12, take=10, kept=10, copied=10)
    pauses = replace(done, pauses=True)
    assert next_goal(Goal(10, 5), {0: done, 1: pauses}, 2) == Goal(None, 10)
    waits = report(newest=15, take=None, copied=10)
    assert next_goal(Goal(None, 10), {0: waits, 1: replace(waits, pauses=True)}, 2) == Goal(None, 10)
    assert next_goal(Goal(None, 10), {0: waits, 1: waits}, 2) == Goal(16, 10)


def test_workers_that_were_further_on_have_it_taken_later() -> None:
    kept = report(newest=12, take=10, kept=10, copied=10)
    late = replace(kept, kept=11, copied=11)
    assert next_goal(Goal(10, 5), {0: kept, 1: late}, 2) == Goal(14, 5, 2)
    assert next_goal(Goal(10, 5, 8), {0: kept, 1: replace(kept, differs=True)}, 2) == Goal(28, 5, 16)
    assert next_goal(Goal(10, 5, 8), {0: kept}, 1) == Goal(18, 10, 6)


def test_a_step_that_becomes_safe_is_written_to_disk_if_that_is_wanted() -> None:
    done = report(newest=12, take=10, kept=10, copied=10)
    wants = replace(done, wanted=True)
    assert next_goal(Goal(10, 5, 1, 3), {0: wants, 1: done}, 2) == Goal(13, 10, 1, 10)
    assert next_goal(Goal(10, 5, 1, 3), {0: done, 1: done}, 2) == Goal(13, 10, 1, 3)
    assert next_goal(Goal(10, 5, 1, 3), {0: wants, 1: replace(done, copied=5)}, 2) == Goal(10, 5, 1, 3)
    late = replace(done, kept=11, copied=11)
    assert next_goal(Goal(10, 5, 1, 3), {0: wants, 1: late}, 2) == Goal(14, 5, 2, 3)


def test_where_nothing_is_copied_a_step_is_only_taken_for_the_disk() -> None:
    idle, wants = report(newest=12), report(newest=12, wanted=True)
    goal = Goal(None, 3, 2, 3)
    assert next_goal(goal, {0: idle, 1: idle}, 2, replicates=False) == goal
    assert next_goal(goal, {0: wants, 1: idle}, 2, replicates=False) == Goal(14, 3, 2, 3)
    taken = [report(newest=14, take=14, kept=14, copied=14, wanted=wanted) for wanted in (True, False)]
    assert next_goal(Goal(14, 3, 2, 3), dict(enumerate(taken)), 2, replicates=False) == Goal(None, 14, 2, 14)


def ids(*steps: int) -> list[SnapshotId]:
    return [SnapshotId(3, step) for step in steps]


def test_a_node_keeps_a_step_when_all_its_workers_have_it() -> None:
    protection = Protection(take=SnapshotId(3, 10))
    assert kept_step(protection, [ids(8, 9, 10), ids(9, 10, 11)]) == (10, False)
    assert kept_step(protection, [ids(8, 9, 10), [*ids(7, 8), None]]) == (None, False)
    assert kept_step(protection, [ids(9, 10), ids(11, 12)]) == (11, True)
    assert kept_step(Protection(), [ids(9, 10)]) == (None, False)


def test_what_is_safe_and_what_becomes_safe_is_not_overwritten() -> None:
    protection = Protection(SnapshotId(3, 5), SnapshotId(3, 10))
    assert slot_to_write(ids(5, 10, 11), (), protection) == 2
    assert slot_to_write(ids(5, 9, 10), (), protection) == 1
    assert slot_to_write(ids(5, 8, 9), (), protection) == 1
    # What is left is being written to disk.
    assert slot_to_write(ids(5, 10, 11), (2,), protection) is None
    assert slot_to_write(ids(5, 10, 11), (), Protection()) == 0
    # Of two slots none is left from the step to take on, until its copy has come.
    assert slot_to_write(ids(5, 9), (), protection) == 1
    assert slot_to_write(ids(5, 10), (), protection) is None
    assert slot_to_write(ids(5, 10), (), Protection(SnapshotId(3, 10))) == 0


def test_a_slow_link_is_said_in_one_line() -> None:
    cost = "fewer snapshots are safe, and a lost node costs the steps since the last of them"
    assert link_problem("n2", 9.9, 5 << 30) == ""
    assert link_problem("n2", 9.9, 0, "timed out") == ""
    assert link_problem("n2", 42.4, 5 << 30) == f"a copy of 5 GiB to n2 takes 42 s: {cost}"
    assert (
        link_problem("n2", 12.0, 0, "timed out") == f"no copy of a snapshot has come to n2 for 12 s (timed out): {cost}"
    )


def holders(*domains: str) -> list[int]:
    """Who holds the copies of each agent of a round; each is on a node of its own."""
    found = partners({rank: report(f"n{rank}", domain=domain) for rank, domain in enumerate(domains)})
    assert sorted(found) == sorted(found.values())
    return [found[rank] for rank in range(len(domains))]


def test_copies_go_to_another_node() -> None:
    found = partners({0: report("a"), 1: report("a"), 2: report("b"), 3: report("c")})
    assert found == {0: 2, 1: 3, 2: 0, 3: 1}
    assert partners({0: report("a"), 1: report("a")}) == {}
    assert holders("", "", "") == [1, 2, 0]
    # To that of the next rank, whatever the nodes' names.
    assert partners({0: report("one"), 1: report("two"), 2: report("three")}) == {0: 1, 1: 2, 2: 0}


def test_copies_go_to_another_failure_domain() -> None:
    assert holders("s1", "s1", "s2", "s2") == [2, 3, 0, 1]
    # At each level: elements of an array, and their switches.
    assert holders("7_0/s1", "7_0/s2", "7_1/s1", "7_1/s2") == [2, 3, 0, 1]
    assert holders("s0/s1", "s0/s1", "s0/s2", "s0/s2") == [2, 3, 0, 1]
    assert holders("", "s1", "s1", "s2") == [2, 3, 0, 1]
    assert holders("s1", "s2", "s2", "s3", "s3") == [2, 3, 4, 0, 1]


def test_in_a_domain_with_more_than_half_of_the_agents_as_few_as_possible_hold_those_of_their_own() -> None:
    domains = ("s1", "s1", "s1", "s1", "s2", "s2")
    inside = [rank for rank, holder in enumerate(holders(*domains)) if domains[rank] == domains[holder]]
    assert inside == [0, 3]
    # Of the domain within that one none holds its own.
    assert holders("s0/a", "s0/a", "s0/b", "s1/c") == [2, 3, 0, 1]
