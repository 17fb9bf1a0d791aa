"""Membership and election keep their promises in thousands of schedules.

SIMULATION_SEEDS, SIMULATION_LEADERS and STOP_SEEDS: about how many schedules to play with one leader, with several
possible ones, and of workers that stop at one step. Of those with several leaders a third is random, and most of the
others are one short script after the other with one more fault at each of its messages. SIMULATION: play only this one,
as the report of a broken promise names it: membership:12, or strikes:12:57:kill for one fault at one message.
"""

from __future__ import annotations

import os
import random

import pytest

from tests.simulation.election.faults import Fault, Script
from tests.simulation.election.world import World
from tests.simulation.schedules import KINDS, PER_SCRIPT, play_all, play_asked

SEEDS = int(os.environ.get("SIMULATION_SEEDS", "1250"))
LEADERS = int(os.environ.get("SIMULATION_LEADERS", "3250"))
NUMBERS = {
    "membership": SEEDS,
    "growth": min(SEEDS // 6, 1000),
    "leaders": LEADERS // 3,
    "strikes": -(-LEADERS * 2 // 3 // PER_SCRIPT),
    "failures": -(-LEADERS // 30 // PER_SCRIPT),
    "sizes": LEADERS // 5,
    "stop": int(os.environ.get("STOP_SEEDS", "1000")),
}
ONLY = os.environ.get("SIMULATION", "")


@pytest.mark.parametrize("kind", KINDS)
def test_every_promise_holds_in_every_schedule(kind: str) -> None:
    if not kind.startswith(ONLY.partition(":")[0]):
        pytest.skip("another schedule is asked for")
    result = play_asked(ONLY) if ONLY else play_all(kind, range(NUMBERS[kind]))
    if result.failure:
        pytest.fail(result.failure, pytrace=False)
    print(f"{result.played} schedules")


@pytest.mark.parametrize("seconds", [2.0, 5.0, 3600.0])
def test_a_run_that_is_suspended_goes_on_with_the_same_round(seconds: float) -> None:
    # Nodes are stopped, and go on, one after the other.
    for seed in range(50):
        rng = random.Random(seed)
        moments = [(8.0 + rng.uniform(0.0, 0.5), 8.0 + seconds + rng.uniform(0.0, 0.8)) for _ in range(4)]
        pauses = [Fault(begin, "pause", index, end - begin) for index, (begin, end) in enumerate(moments)]
        world = World(Script(seed, 4, tuple(pauses)))
        before: list[int] = []
        world.at(7.9, lambda world=world, before=before: before.extend(world.checks.told))
        world.run()
        assert list(world.checks.told) == before, f"seed {seed}"
