"""When a snapshot is written to disk."""

from __future__ import annotations

from dataclasses import replace

from slurm_elastic.snapshot.checkpoint_lineage import CheckpointId
from slurm_elastic.snapshot.disk import Progress, Target, next_snapshot
from slurm_elastic.snapshot.lineage import SnapshotId

ORIGIN = SnapshotId(2, 90)
TARGET = Target("/checkpoints", every=60, keep=2, start=8, round=3)
FROM_MEMORY = replace(TARGET, origin=(ORIGIN, CheckpointId(7, 90)))
HELD = [ORIGIN, SnapshotId(3, 91), SnapshotId(3, 92)]


def test_the_newest_of_the_round_is_written_when_the_interval_has_passed() -> None:
    assert next_snapshot(TARGET, Progress(100.0), HELD, 99.0) is None
    assert next_snapshot(TARGET, Progress(100.0), HELD, 100.0) == (HELD[2], CheckpointId(8, 92))
    assert next_snapshot(TARGET, Progress(100.0, written=92), HELD, 100.0) is None
    assert next_snapshot(TARGET, Progress(100.0), [ORIGIN], 100.0) is None


def test_the_snapshot_in_memory_that_the_round_started_from_is_written_at_once() -> None:
    due = Progress(100.0, origin_due=True)
    assert next_snapshot(FROM_MEMORY, due, HELD, 0.0) == (ORIGIN, CheckpointId(7, 90))
    # A newer one has it on its line.
    assert next_snapshot(FROM_MEMORY, due, HELD, 100.0) == (HELD[2], CheckpointId(8, 92))
    # It is still on its way to this node, or overwritten.
    assert next_snapshot(FROM_MEMORY, due, HELD[1:], 0.0) is None


def test_before_the_end_the_newest_is_written_whatever_the_time() -> None:
    last = Progress(100.0, origin_due=True, last=True)
    assert next_snapshot(FROM_MEMORY, last, HELD, 0.0) == (HELD[2], CheckpointId(8, 92))
    assert next_snapshot(FROM_MEMORY, last, [ORIGIN], 0.0) == (ORIGIN, CheckpointId(7, 90))
    assert next_snapshot(FROM_MEMORY, replace(last, written=92, origin_due=False), HELD, 0.0) is None
