"""Leaders die, pause, are cut off and hand over in thousands of schedules, and at most one group trains.

SIMULATION_LEADERS: about how many schedules to play, a third of them random, the others one short script after the
other with one more fault at each of its messages. SIMULATION_LEADER: play this random one only. SIMULATION_STRIKE: play
this script only, or with message and kind (12:57:kill) this one. SIMULATION_FAILURE: the same for scripts in which
workers fail by themselves. SIMULATION_SIZES: play this one only of those whose script cannot use all numbers of nodes.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable

import pytest

from tests.simulation.election import faults
from tests.simulation.election.faults import Fault, Script
from tests.simulation.election.world import World
from tests.simulation.schedules import (
    Result,
    play_all,
    play_failures,
    play_leaders,
    play_script,
    play_sizes,
    play_strikes,
)

SCHEDULES = int(os.environ.get("SIMULATION_LEADERS", "3250"))
LEADER = os.environ.get("SIMULATION_LEADER")
STRIKE = os.environ.get("SIMULATION_STRIKE")
FAILURE = os.environ.get("SIMULATION_FAILURE")
SIZES = os.environ.get("SIMULATION_SIZES")

PER_SCRIPT = 460
"""Schedules that one script is good for, on average."""


def check(result: Result) -> None:
    if result.failure:
        pytest.fail(result.failure, pytrace=False)
    print(f"{result.played} schedules")


@pytest.mark.skipif(bool(STRIKE or FAILURE or SIZES), reason="another schedule is asked for")
def test_one_group_trains_whatever_happens_when() -> None:
    check(play_all("leaders", range(SCHEDULES // 3)) if LEADER is None else play_leaders(int(LEADER)))


@pytest.mark.skipif(bool(LEADER or FAILURE or SIZES), reason="another schedule is asked for")
def test_one_group_trains_whatever_happens_to_the_leader_at_every_message() -> None:
    if STRIKE is None:
        check(play_all("strikes", range(-(-SCHEDULES * 2 // 3 // PER_SCRIPT))))
    else:
        play_one(STRIKE, play_strikes, faults.script)


@pytest.mark.skipif(bool(LEADER or STRIKE or SIZES), reason="another schedule is asked for")
def test_a_charge_outlives_the_leader_whatever_happens_to_it_at_every_message() -> None:
    if FAILURE is None:
        check(play_all("failures", range(-(-SCHEDULES // 30 // PER_SCRIPT))))
    else:
        play_one(FAILURE, play_failures, faults.failing)


@pytest.mark.skipif(bool(LEADER or STRIKE or FAILURE), reason="another schedule is asked for")
def test_no_growth_or_loss_ends_a_healthy_run_whoever_leads() -> None:
    check(play_all("sizes", range(SCHEDULES // 5)) if SIZES is None else play_sizes(int(SIZES)))


def play_one(asked: str, play: Callable[[int], Result], script: Callable[[int], Script]) -> None:
    seed, *where = asked.split(":")
    if not where:
        check(play(int(seed)))
        return
    transcript: list[str] = []
    violation = play_script(faults.strike(script(int(seed)), int(where[0]), where[1]), transcript)
    print("\n".join(transcript))
    assert violation is None


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
