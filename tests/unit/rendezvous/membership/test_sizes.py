"""Rounds that may have some numbers of nodes only: the largest valid number trains, the others are spares."""

from __future__ import annotations

import pytest

from slurm_elastic.rendezvous.membership.config import Settings


@pytest.mark.parametrize(
    ("agents", "size"), [(0, 0), (1, 0), (2, 2), (3, 2), (4, 4), (7, 4), (8, 8), (9, 8), (16, 8), (100, 8)]
)
def test_a_round_takes_the_largest_valid_number(agents: int, size: int) -> None:
    assert Settings(2, 8, (2, 4, 8)).round_size(agents) == size


def test_every_number_is_valid_by_default() -> None:
    assert [Settings(2, 4).round_size(agents) for agents in range(6)] == [0, 0, 2, 3, 4, 4]
