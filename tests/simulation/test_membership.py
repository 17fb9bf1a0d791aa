"""Nodes that come together cost one round, planned changes no step; and what is found is made small and reported."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest

from slurm_elastic.rendezvous.membership.config import Settings
from tests.simulation.drawing import draw, draw_planned
from tests.simulation.faults import CALM, NORMAL, Arrive, Schedule
from tests.simulation.mutations import MUTATIONS
from tests.simulation.shrink import play, report, simpler, smallest
from tests.simulation.violation import Violation
from tests.simulation.world import World

PLANNED = 200
"""Schedules in which nothing goes wrong."""


def sizes_of_rounds(seed: int, *arrivals: Arrive) -> list[int]:
    """Numbers of nodes in the rounds of a run to which these come when it has begun with one."""
    noise = replace(NORMAL, late=0.0) if seed % 2 else CALM
    actions = (Arrive(at=0.0, agent="node0/1", node="node0"), *arrivals)
    world = World(Schedule(seed, Settings(min_nodes=1, max_nodes=16), noise, actions))
    world.settle()
    return [len(table.places) for table in world.checks.tables.values()]


@pytest.mark.parametrize("seed", range(20))
def test_ten_nodes_that_come_together_cost_one_further_round(seed: int) -> None:
    arrivals = [Arrive(at=2.0 + 0.004 * index, agent=f"node{index}/1", node=f"node{index}") for index in range(1, 11)]
    assert sizes_of_rounds(seed, *arrivals) == [1, 11]


@pytest.mark.parametrize("how", ["announced", "one srun"])
@pytest.mark.parametrize("seed", range(10))
def test_nodes_that_start_together_and_join_seconds_apart_cost_one_further_round(seed: int, how: str) -> None:
    rng = random.Random(seed)
    arrivals = []
    for index in range(1, 5):
        late = rng.uniform(0.0, 1.5)
        arrival = Arrive(at=2.0 + late, agent=f"node{index}/1", node=f"node{index}", cohort=("7.0.1", 4))
        if how == "announced":
            # One may get ready while another has not started yet, but none joins before all have said that they come.
            arrival = replace(arrival, seconds=2.0 + rng.uniform(0.0, 1.5), cohort=("", 1))
        arrivals.append(arrival)
    assert sizes_of_rounds(seed, *arrivals) == [1, 5]


@pytest.mark.parametrize("part", range(2))
def test_leaves_and_growth_lose_no_step_when_all_take_part(part: int) -> None:
    planned = 0
    for seed in range(part, PLANNED, 2):
        schedule = draw_planned(seed)
        world = World(schedule)
        try:
            world.run()
        except Violation as violation:
            pytest.fail(report(schedule, violation, f"planned:{seed}"), pytrace=False)
        planned += len(world.checks.planned)
        lost = {
            round_: group.furthest
            for round_, group in world.groups.items()
            # A step may end while a node says that its workers have only just started.
            if round_ in world.checks.broken_off and group.furthest > 1
        }
        assert not lost, f"seed {seed}: steps of rounds that were broken off: {lost}"
    assert planned > 2 * PLANNED, "rounds did end as planned"


def test_a_mistake_is_found_made_small_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    MUTATIONS["a lost node is charged"].make(monkeypatch)
    schedule, violation = next((each, found) for each in map(draw, range(300)) if (found := play(each)) is not None)
    assert len(smallest(schedule, violation, simpler, play).actions) <= 5
    text = report(schedule, violation, "membership:7")
    assert "SIMULATION=membership:7" in text
    assert "the smallest schedule found" in text
    assert re.search(r"\*\*\* [A-Z]", text)
    assert "only workers that fail by themselves are charged" in text
