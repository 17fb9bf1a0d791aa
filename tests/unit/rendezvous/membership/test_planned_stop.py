"""Rounds that end as planned: everybody stops at one step."""

from __future__ import annotations

import pytest

from slurm_elastic.rendezvous.membership.planned_stop import seconds_to_stop


@pytest.mark.parametrize(
    ("seconds", "left"), [(30.0, 25.0), (6.0, 3.0), (10.0, 5.0), (11.0, 6.0), (0.0, 0.0), (-3.0, 0.0)]
)
def test_the_margin_takes_at_most_half_of_a_short_time(seconds: float, left: float) -> None:
    assert seconds_to_stop(seconds, margin=5.0) == left
