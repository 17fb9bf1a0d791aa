"""No schedule overwrites what is safe or restores what is not whole; `snapshot_mutations.py` has mistakes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.simulation.replicas import play
from tests.simulation.snapshots import KINDS
from tests.simulation.violation import Violation

SEEDS = range(1500, 3000)
"""Those before do not come near the rarest mistake."""


def play_all(seeds: Sequence[int] = SEEDS, slots: int | None = None, ahead: int = 1) -> int:
    """Play schedules, with these slots on all nodes if it is given; returns how many steps became safe."""
    return sum(play(seed, None if slots is None else (slots,), ahead) for seed in seeds)


@pytest.mark.parametrize("kind", range(len(KINDS)))
def test_what_is_safe_stays_and_what_is_restored_is_whole(kind: int) -> None:
    seeds = SEEDS[kind :: len(KINDS)]
    # Else nothing was tried.
    assert play_all(seeds) > len(seeds)


def test_a_node_with_two_slots_needs_ranks_that_are_one_step_ahead_at_most() -> None:
    play_all(SEEDS[::10], slots=3, ahead=2)
    with pytest.raises(Violation, match="not complete"):
        play_all(SEEDS[::10], slots=2, ahead=2)
