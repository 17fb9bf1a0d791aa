"""No schedule restores torn, mixed or off-lineage state; `snapshot_mutations.py` has mistakes that are found."""

from __future__ import annotations

from tests.simulation.snapshots import play

SCHEDULES = 3000


def test_every_round_starts_from_one_whole_snapshot_of_its_line() -> None:
    for seed in range(SCHEDULES):
        play(seed)
