"""Leaders die, pause, are cut off and hand over in thousands of random schedules, and at most one group trains.

SIMULATION_LEADERS: how many schedules to play; SIMULATION_LEADER: play this one only, and tell its story.
"""

from __future__ import annotations

import os
import random

import pytest

from tests.simulation.checks import Violation
from tests.simulation.succession.world import LEADER, Fault, World

SEEDS = int(os.environ.get("SIMULATION_LEADERS", "1200"))
ONLY = os.environ.get("SIMULATION_LEADER")
PARTS = 6

KINDS = {"kill": 5, "power": 2, "pause": 3, "leave": 4, "arrive": 4, "cut": 4, "break": 2, "disk": 1}


def draw(seed: int) -> tuple[int, list[Fault]]:
    rng = random.Random(seed)
    agents = rng.choice((2, 3, 3, 4, 4, 5, 6))
    faults = []
    at = 2.0
    for _ in range(rng.choice((1, 2, 3, 4, 6, 9))):
        # Half of what goes wrong does so while something else is being dealt with.
        at += rng.expovariate(8.0) if rng.random() < 0.5 else rng.uniform(0.0, 6.0)
        kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
        seconds = rng.choice((rng.uniform(0.05, 2.0), rng.uniform(2.0, 9.0)))
        side = tuple(rng.sample(range(agents), rng.randint(1, agents - 1)))
        agent = rng.choice((LEADER, rng.randrange(agents)))
        lasts = kind in ("pause", "cut", "disk")
        faults.append(Fault(at, kind, agent, seconds if lasts else 0.0, side if kind == "cut" else ()))
    return agents, faults


def play(seed: int, agents: int, faults: list[Fault], story: list[str] | None = None) -> Violation | None:
    try:
        World(seed, agents, faults, story).run()
    except Violation as violation:
        return violation
    return None


def report(seed: int) -> str:
    """The smallest schedule that breaks the same promise, and what happens in it."""
    agents, faults = draw(seed)
    violation = play(seed, agents, faults)
    assert violation is not None
    smaller = True
    while smaller:
        smaller = False
        for index in range(len(faults)):
            fewer = faults[:index] + faults[index + 1 :]
            found = play(seed, agents, fewer)
            if found is not None and found.promise == violation.promise:
                faults, violation, smaller = fewer, found, True
                break
    story: list[str] = []
    play(seed, agents, faults, story)
    head = [f"seed {seed}, {agents} agents: {violation}", f"to repeat: SIMULATION_LEADER={seed}"]
    return "\n".join([*head, *map(str, faults), *story[-200:]])


@pytest.mark.parametrize("part", range(PARTS))
def test_one_group_trains_whoever_leads(part: int) -> None:
    seeds = range(part, SEEDS, PARTS) if ONLY is None else range(int(ONLY), int(ONLY) + (part == 0))
    for seed in seeds:
        agents, faults = draw(seed)
        if play(seed, agents, faults) is not None:
            pytest.fail(report(seed), pytrace=False)
