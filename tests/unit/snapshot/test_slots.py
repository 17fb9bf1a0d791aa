"""The header of a slot."""

from __future__ import annotations

import pytest

from slurm_elastic.snapshot.lineage import Copy, SnapshotId
from slurm_elastic.snapshot.memory import FIELDS, HEADER, Contents, Slot, clear_slot, contents_of, fill_slot
from slurm_elastic.snapshot.sharding import round_up

WRITTEN = Contents(Copy(SnapshotId(3, 120), "fedcba9876543210"), 640, 77)


def filled(contents: Contents) -> list[int]:
    fields = [0] * FIELDS
    fill_slot(fields, contents, lambda: None)
    return fields


def test_only_what_is_committed_is_there() -> None:
    assert contents_of([0] * FIELDS, 1 << 20) is None
    fields = filled(WRITTEN)
    assert contents_of(fields, WRITTEN.size) == WRITTEN
    assert WRITTEN.size == HEADER + 717
    clear_slot(fields)
    assert contents_of(fields, WRITTEN.size) is None


def test_a_header_is_not_believed_beyond_its_file() -> None:
    assert contents_of(filled(WRITTEN), WRITTEN.size - 1) is None
    for broken in (Contents(WRITTEN.copy, -1, 77), Contents(WRITTEN.copy, 640, -1)):
        assert contents_of(filled(broken), 1 << 20) is None


def test_a_header_of_another_version_holds_nothing() -> None:
    fields = filled(WRITTEN)
    fields[0] += 1
    assert contents_of(fields, 1 << 20) is None


@pytest.mark.parametrize(("offset", "expected"), [(0, 0), (1, 64), (64, 64), (65, 128)])
def test_tensors_are_aligned(offset: int, expected: int) -> None:
    assert round_up(offset) == expected


def test_a_slot_that_is_read_is_marked_and_keeps_what_it_holds() -> None:
    slot = Slot.make()
    slot.grow(WRITTEN.size)
    slot.fill(WRITTEN, lambda: None)
    slot.busy = True
    assert slot.busy
    assert slot.contents() == WRITTEN
    slot.busy = False
    assert not slot.busy


def test_a_part_says_which_one_it_is_and_where_its_own_state_begins() -> None:
    part = Contents(Copy.of_part(SnapshotId(3, 120), 2, 4), 640, 77, 512)
    assert contents_of(filled(part), part.size) == part
    for broken in (
        Contents(Copy.of_part(SnapshotId(3, 120), 4, 4), 640, 77),
        Contents(Copy.of_part(SnapshotId(3, 120), -2, 4), 640, 77),
        Contents(Copy.of_part(SnapshotId(3, 120), 0, 1 << 40), 640, 77),
        Contents(Copy.of_part(SnapshotId(3, 120), 2, 4), 640, 77, 641),
    ):
        assert contents_of(filled(broken), 1 << 20) is None
