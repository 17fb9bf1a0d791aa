"""Leaders die, pause, are cut off and hand over in thousands of schedules, and at most one group trains.

SIMULATION_LEADERS: about how many schedules to play, a third of them random, the others one short script after the
other with one more fault at each of its messages. SIMULATION_LEADER: play this random one only. SIMULATION_STRIKE: play
this script only, or with message and kind (12:57:kill) this one. SIMULATION_FAILURE: the same for scripts in which
workers fail by themselves.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable

import pytest

from tests.simulation.schedules import Result, play_all, play_failures, play_leaders, play_script, play_strikes
from tests.simulation.succession import faults, party, search
from tests.simulation.succession.faults import Fault, Script
from tests.simulation.succession.world import World

SCHEDULES = int(os.environ.get("SIMULATION_LEADERS", "65000"))
LEADER = os.environ.get("SIMULATION_LEADER")
STRIKE = os.environ.get("SIMULATION_STRIKE")
FAILURE = os.environ.get("SIMULATION_FAILURE")

PER_SCRIPT = 400
"""Schedules that one script is good for, on average."""


def check(result: Result) -> None:
    if result.failure:
        pytest.fail(result.failure, pytrace=False)
    print(f"{result.played} schedules")


@pytest.mark.skipif(bool(STRIKE or FAILURE), reason="another schedule is asked for")
def test_one_group_trains_whatever_happens_when() -> None:
    check(play_all("leaders", range(SCHEDULES // 3)) if LEADER is None else play_leaders(int(LEADER)))


@pytest.mark.skipif(bool(LEADER or FAILURE), reason="another schedule is asked for")
def test_one_group_trains_whatever_happens_to_the_leader_at_every_message() -> None:
    if STRIKE is None:
        check(play_all("strikes", range(-(-SCHEDULES * 2 // 3 // PER_SCRIPT))))
    else:
        play_one(STRIKE, play_strikes, faults.script)


@pytest.mark.skipif(bool(LEADER or STRIKE), reason="another schedule is asked for")
def test_a_charge_outlives_the_leader_whatever_happens_to_it_at_every_message() -> None:
    if FAILURE is None:
        check(play_all("failures", range(-(-SCHEDULES // 30 // PER_SCRIPT))))
    else:
        play_one(FAILURE, play_failures, faults.failing)


def play_one(asked: str, play: Callable[[int], Result], script: Callable[[int], Script]) -> None:
    seed, *where = asked.split(":")
    if not where:
        check(play(int(seed)))
        return
    story: list[str] = []
    violation = play_script(faults.strike(script(int(seed)), int(where[0]), where[1]), story)
    print("\n".join(story))
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


def test_candidates_that_do_not_know_of_each_other_let_the_members_find_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # In this schedule each of two agents that a lost leader had given up gets one member of the last round, if whoever
    # goes by a newer one does not look for them.
    def newest_alone(told: list[str], told_in: int, recorded: list[str], recorded_in: int) -> list[str]:
        return recorded if recorded and (recorded_in > told_in or not told) else told

    monkeypatch.setattr(search, "newest_order", newest_alone)
    story: list[str] = []
    assert play_script(faults.draw(316052), story) is None
    assert any("stands down for the members of the last round" in line for line in story)


def test_two_that_stand_and_may_not_lead_with_half_of_a_round_find_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    # One of them led that round, comes back when another has been asked to lead, and that other has left. In this
    # schedule it stands at once when it goes on.
    monkeypatch.setattr(party, "STOOD_STILL", math.inf)
    story: list[str] = []
    assert play_script(faults.strike(faults.script(10000624), 68, "leave"), story) is None
    assert any("n2/7.0/3" in line and "stands down for n0/7.0/1" in line for line in story)


def test_a_leader_is_found_although_one_that_it_superseded_said_later_where_it_is() -> None:
    assert play_script(faults.strike(faults.script(10000902), 9, "power")) is None


def test_who_finds_a_leader_in_the_moment_it_stands_itself_stands_down() -> None:
    # Its link to that leader breaks at once, and it went by itself, which ended the round for everybody.
    story: list[str] = []
    assert play_script(faults.strike(faults.script(20000441), 81, "cut"), story) is None
    assert any("n2/7.0/3" in line and "stands down for n1/7.0/2" in line for line in story)
