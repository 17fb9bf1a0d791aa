"""The choice of the checkpoint on disk that a group starts from."""

from __future__ import annotations

import msgspec
import pytest

from slurm_elastic.snapshot.disk import lineage
from slurm_elastic.snapshot.lineage import SnapshotId


def ids(*pairs: tuple[int, int]) -> tuple[lineage.CheckpointId, ...]:
    return tuple(lineage.CheckpointId(*pair) for pair in pairs)


NEWEST = lineage.Start(8, ids((5, 40), (7, 100)), "7", 4)


def test_it_is_chosen_all_the_same_before_the_beginning() -> None:
    assert lineage.choose_checkpoint(NEWEST, ids((7, 90)), below=90) == lineage.CheckpointId(7, 90)
    assert lineage.choose_checkpoint(NEWEST, ids((7, 90), (8, 120)), below=80) == lineage.CheckpointId(8, 120)
    assert lineage.choose_checkpoint(NEWEST, ids((7, 150)), below=90) is None


def test_going_back_to_an_earlier_checkpoint_forgets_what_came_after_it() -> None:
    assert lineage.line_from_checkpoint(NEWEST, lineage.CheckpointId(8, 120)) == ids((5, 40), (7, 100), (8, 120))
    assert lineage.line_from_checkpoint(NEWEST, lineage.CheckpointId(7, 90)) == ids((5, 40), (7, 90))
    assert lineage.line_from_checkpoint(NEWEST, lineage.CheckpointId(5, 30)) == ids((5, 30))
    assert lineage.line_from_checkpoint(NEWEST, None) == ()
    assert lineage.line_from_checkpoint(None, None) == ()


def test_a_snapshot_in_memory_belongs_to_the_start_of_its_round() -> None:
    starts = [NEWEST, lineage.Start(7, ids((5, 40)), "7", 3), lineage.Start(5, (), "6", 3)]
    assert lineage.line_from_memory(starts, "7", 4, 130) == ids((5, 40), (7, 100), (8, 130))
    assert lineage.line_from_memory(starts, "7", 3, 95) == ids((5, 40), (7, 95))
    assert lineage.line_from_memory(starts, "7", 2, 95) == ()
    assert lineage.line_from_memory([], "7", 2, 95) == ()


def test_the_newest_checkpoint_between_what_memory_holds_and_what_it_has_lost_is_on_the_line() -> None:
    starts = [NEWEST, lineage.Start(7, ids((5, 40)), "7", 3), lineage.Start(5, (), "6", 3)]
    present = ids((5, 40), (7, 95), (7, 150), (8, 130))
    held, lost = SnapshotId(3, 90), SnapshotId(4, 130)
    assert lineage.checkpoint_between(starts, "7", held, lost, present) == lineage.CheckpointId(8, 130)
    # That one was not written yet, or is newer: workers may have failed from it.
    assert lineage.checkpoint_between(starts, "7", held, lost, present[:3]) == lineage.CheckpointId(7, 95)
    assert lineage.checkpoint_between(starts, "7", held, SnapshotId(4, 129), present) == lineage.CheckpointId(7, 95)
    # Taken after what the newest start came from, not newer than memory, of another run.
    assert lineage.checkpoint_between(starts, "7", held, lost, present[2:3]) is None
    assert lineage.checkpoint_between(starts, "7", lost, lost, present) is None
    assert lineage.checkpoint_between(starts, "6", held, lost, present) is None
    assert lineage.checkpoint_between([], "7", held, lost, present) is None


def test_a_line_stays_short() -> None:
    newest = lineage.Start(1)
    for number in range(2, 100):
        newest = lineage.Start(
            number, lineage.line_from_checkpoint(newest, lineage.CheckpointId(number - 1, 10 * number))
        )
    assert len(newest.line) == 16
    assert newest.line[-1] == lineage.CheckpointId(98, 990)


def test_old_checkpoints_go_and_so_does_what_the_line_has_left_behind() -> None:
    present = ids((5, 30), (5, 40), (7, 90), (7, 150), (6, 900), (8, 110))
    assert set(lineage.deletable(NEWEST, present, 2)) == set(ids((5, 30), (5, 40), (7, 150), (6, 900)))
    assert lineage.deletable(NEWEST, ids((8, 110)), 2) == []


def test_checkpoints_of_other_trainings_stay() -> None:
    # The newest start began from nothing: what is older may be all that a user has.
    assert lineage.deletable(lineage.Start(8), ids((5, 40), (7, 100), (8, 1), (8, 2)), 1) == list(ids((8, 1)))
    assert lineage.deletable(NEWEST, ids((4, 500), (8, 110)), 1) == []


def test_records() -> None:
    assert lineage.read_start(msgspec.json.encode(NEWEST), 8) == NEWEST
    for content in (b"", b"[]", b'{"number":"8"}', msgspec.json.encode(lineage.Start(9))):
        with pytest.raises(ValueError, match=r"."):
            lineage.read_start(content, 8)
