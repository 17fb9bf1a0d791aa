"""The header of a slot."""

from __future__ import annotations

import pytest

from slurm_elastic.snapshot.lineage import Copy, SnapshotId
from slurm_elastic.snapshot.slots import FIELDS, HEADER, Contents, clear, contents, fill, is_busy, round_up, set_busy

WRITTEN = Contents(Copy(SnapshotId(3, 120), "fedcba9876543210"), 640, 77)


def test_only_what_is_committed_is_there() -> None:
    fields = [0] * FIELDS
    assert contents(fields, 1 << 20) is None
    fill(fields, WRITTEN, lambda: None)
    assert contents(fields, WRITTEN.size) == WRITTEN
    assert WRITTEN.size == HEADER + 717
    clear(fields)
    assert contents(fields, WRITTEN.size) is None


def test_a_header_is_not_believed_beyond_its_file() -> None:
    fields = [0] * FIELDS
    fill(fields, WRITTEN, lambda: None)
    assert contents(fields, WRITTEN.size - 1) is None
    for broken in (Contents(WRITTEN.copy, -1, 77), Contents(WRITTEN.copy, 640, -1)):
        fill(fields, broken, lambda: None)
        assert contents(fields, 1 << 20) is None


def test_a_header_of_another_version_holds_nothing() -> None:
    fields = [0] * FIELDS
    fill(fields, WRITTEN, lambda: None)
    fields[0] += 1
    assert contents(fields, 1 << 20) is None


@pytest.mark.parametrize(("offset", "expected"), [(0, 0), (1, 64), (64, 64), (65, 128)])
def test_tensors_are_aligned(offset: int, expected: int) -> None:
    assert round_up(offset) == expected


def test_a_copy_that_fails_leaves_nothing() -> None:
    fields = [0] * FIELDS
    fill(fields, WRITTEN, lambda: None)

    def fails() -> None:
        raise OSError("no memory")

    with pytest.raises(OSError, match="no memory"):
        fill(fields, WRITTEN, fails)
    assert contents(fields, WRITTEN.size) is None


def test_a_slot_that_is_read_is_marked_and_keeps_what_it_holds() -> None:
    fields = [0] * FIELDS
    fill(fields, WRITTEN, lambda: None)
    set_busy(fields, True)
    assert is_busy(fields)
    assert contents(fields, WRITTEN.size) == WRITTEN
    set_busy(fields, False)
    assert not is_busy(fields)


def test_a_part_says_which_one_it_is_and_where_its_own_state_begins() -> None:
    fields = [0] * FIELDS
    part = Contents(Copy.of_part(SnapshotId(3, 120), 2, 4), 640, 77, 512)
    fill(fields, part, lambda: None)
    assert contents(fields, part.size) == part
    for broken in (
        Contents(Copy.of_part(SnapshotId(3, 120), 4, 4), 640, 77),
        Contents(Copy.of_part(SnapshotId(3, 120), -2, 4), 640, 77),
        Contents(Copy.of_part(SnapshotId(3, 120), 0, 1 << 40), 640, 77),
        Contents(Copy.of_part(SnapshotId(3, 120), 2, 4), 640, 77, 641),
    ):
        fill(fields, broken, lambda: None)
        assert contents(fields, 1 << 20) is None
