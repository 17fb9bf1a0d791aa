"""When a snapshot is written to disk."""

from __future__ import annotations

from dataclasses import replace

from slurm_elastic.snapshot.disk.agent_side import Held, Progress, Target, is_wanted, next_snapshot, step_before
from slurm_elastic.snapshot.disk.lineage import CheckpointId
from slurm_elastic.snapshot.hand_over import Directory
from slurm_elastic.snapshot.lineage import Copy, Group, SnapshotId

ORIGIN = SnapshotId(2, 90)
DIRECTORY = Directory("/checkpoints", every=60, keep=2, start=8, origin=7)
TARGET = Target(DIRECTORY, round=3)
FROM_MEMORY = replace(TARGET, origin=ORIGIN)
IDS = [ORIGIN, SnapshotId(3, 91), SnapshotId(3, 92)]
HELD = Held([Copy(each, "") for each in IDS])
# Two nodes with two workers each; the second one of this node has not come to step 92.
OTHER = replace(FROM_MEMORY, group=Group(1, 2, 2, 2, 4))
FIRST = replace(FROM_MEMORY, group=Group(0, 2, 2, 0, 4))
PARTS = [Copy.of_part(each, part, 4) for part in (2, 3) for each in IDS[: 3 if part == 2 else 2]]
WITH_PARTS = Held([Copy(each, "", 4) for each in IDS], PARTS)


def test_a_snapshot_has_the_start_that_took_it_in_its_name() -> None:
    assert FROM_MEMORY.checkpoint(IDS[2]) == CheckpointId(8, 92)
    assert FROM_MEMORY.checkpoint(ORIGIN) == CheckpointId(7, 90)


def test_the_newest_of_the_round_is_written_when_the_interval_has_passed() -> None:
    assert next_snapshot(TARGET, Progress(100.0), HELD, 99.0) is None
    assert next_snapshot(TARGET, Progress(100.0), HELD, 100.0) == IDS[2]
    assert next_snapshot(TARGET, Progress(100.0, written=92), HELD, 100.0) is None
    assert next_snapshot(TARGET, Progress(100.0), Held(HELD.whole[:1]), 100.0) is None


def test_the_newest_of_the_round_is_written_when_so_many_steps_have_passed() -> None:
    due = replace(DIRECTORY, every_steps=3, begins=90)
    steps, earlier = replace(TARGET, directory=due), replace(TARGET, directory=replace(due, begins=89))
    assert next_snapshot(steps, Progress(100.0), HELD, 0.0) is None
    assert next_snapshot(earlier, Progress(100.0), HELD, 0.0) == IDS[2]
    assert next_snapshot(steps, Progress(100.0, written=90), HELD, 0.0) is None
    assert next_snapshot(steps, Progress(100.0, written=90), HELD, 100.0) == IDS[2]
    assert next_snapshot(steps, Progress(100.0, written=89), HELD, 0.0) == IDS[2]
    # Not again and again on a full disk.
    assert next_snapshot(steps, Progress(100.0, written=89, failed=True), HELD, 0.0) is None
    assert is_wanted(
        replace(FIRST, directory=replace(DIRECTORY, every_steps=1)), Progress(100.0, written=90), WITH_PARTS, 0.0
    )


def test_the_snapshot_in_memory_that_the_round_started_from_is_written_at_once() -> None:
    due = Progress(100.0, origin_due=True)
    assert next_snapshot(FROM_MEMORY, due, HELD, 0.0) == ORIGIN
    # A newer one has it on its line.
    assert next_snapshot(FROM_MEMORY, due, HELD, 100.0) == IDS[2]
    # It is still on its way to this node, or overwritten.
    assert next_snapshot(FROM_MEMORY, due, Held(HELD.whole[1:]), 0.0) is None


def test_before_the_end_the_newest_is_written_whatever_the_time() -> None:
    last = Progress(100.0, origin_due=True, last=True)
    assert next_snapshot(FROM_MEMORY, last, HELD, 0.0) == IDS[2]
    assert next_snapshot(FROM_MEMORY, last, Held(HELD.whole[:1]), 0.0) == ORIGIN
    assert next_snapshot(FROM_MEMORY, replace(last, written=92, origin_due=False), HELD, 0.0) is None


def test_state_that_all_ranks_have_is_written_by_one_agent() -> None:
    last = Progress(100.0, origin_due=True, last=True)
    assert next_snapshot(OTHER, last, HELD, 200.0) is None
    assert not is_wanted(OTHER, Progress(100.0), HELD, 200.0)
    assert not is_wanted(FIRST, Progress(100.0), HELD, 200.0)


def test_nodes_with_parts_write_a_step_that_all_keep() -> None:
    assert is_wanted(FIRST, Progress(100.0), WITH_PARTS, 100.0)
    assert not is_wanted(FIRST, Progress(100.0), WITH_PARTS, 99.0)
    assert not is_wanted(FIRST, Progress(100.0, agreed=91), WITH_PARTS, 100.0)
    assert not is_wanted(FIRST, Progress(100.0, written=91), WITH_PARTS, 100.0)
    assert not is_wanted(OTHER, Progress(100.0), WITH_PARTS, 100.0)
    assert next_snapshot(FIRST, Progress(100.0), WITH_PARTS, 100.0) is None
    for target in (FIRST, OTHER):
        assert next_snapshot(target, Progress(100.0, agreed=91), WITH_PARTS, 0.0) == IDS[1]
        assert next_snapshot(target, Progress(100.0, written=91, agreed=91), WITH_PARTS, 0.0) is None
        assert next_snapshot(target, Progress(100.0, agreed=92), WITH_PARTS, 0.0) is None
    # A node alone has all parts.
    alone = replace(FIRST, group=Group(0, 1, 2, 0, 2))
    assert not is_wanted(alone, Progress(100.0), WITH_PARTS, 100.0)
    assert next_snapshot(alone, Progress(100.0), WITH_PARTS, 100.0) == IDS[1]


def test_before_the_end_the_newest_step_of_all_ranks_of_the_node_is_written() -> None:
    last = Progress(100.0, last=True)
    for target in (FIRST, OTHER):
        assert next_snapshot(target, last, WITH_PARTS, 0.0) == IDS[1]


def test_the_step_before_is_one_of_the_round_that_all_ranks_of_the_node_have() -> None:
    whole = Held(WITH_PARTS.whole, [*PARTS, Copy.of_part(IDS[2], 3, 4)])
    for target in (FIRST, OTHER):
        assert step_before(target, 92, whole) == IDS[1]
        assert step_before(target, 91, whole) is None
        assert step_before(target, 92, Held(whole.whole, PARTS[:3])) is None


def test_each_agent_writes_parts_of_the_origin_that_it_holds() -> None:
    due = Progress(100.0, origin_due=True)
    whole = WITH_PARTS.whole
    replicas = [Copy.of_part(ORIGIN, 1, 4)]
    assert next_snapshot(OTHER, due, Held(whole, [], replicas), 0.0) == ORIGIN
    assert next_snapshot(OTHER, due, Held(whole), 0.0) is None
    # The state of all ranks is always to be written.
    assert next_snapshot(FIRST, due, Held(whole), 0.0) == ORIGIN
    # Without a description the part cannot be written yet.
    assert next_snapshot(OTHER, due, Held([], [], replicas), 0.0) is None
