"""All workers of all nodes stop at one step, whichever is ahead and whichever agent leads.

STOP_SEEDS: how many schedules to play; STOP_SEED: play this one only.
"""

from __future__ import annotations

import os

from tests.simulation.schedules import play_all, play_stop

SEEDS = int(os.environ.get("STOP_SEEDS", "1000"))
ONLY = os.environ.get("STOP_SEED")


def test_everybody_stops_at_one_step_in_every_schedule() -> None:
    result = play_all("stop", range(SEEDS)) if ONLY is None else play_stop(int(ONLY))
    assert not result.failure, result.failure
