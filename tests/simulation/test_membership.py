"""Membership keeps its promises in thousands of random schedules, and the simulation finds out when it does not.

SIMULATION_SEEDS: how many schedules to play; SIMULATION_FIRST: the first seed; SIMULATION_SEED: play this one only.
"""

from __future__ import annotations

import os
import random
import re
from dataclasses import replace
from typing import Any

import pytest

from slurm_elastic.rendezvous.membership import advance, machine, planned_stop, state, transitions
from slurm_elastic.rendezvous.membership import transitions as pending_joins
from slurm_elastic.rendezvous.membership.config import Settings
from slurm_elastic.rendezvous.membership.events import Connected, Interrupt
from tests.simulation.drawing import draw, draw_planned, draw_sizes
from tests.simulation.faults import CALM, NORMAL, Arrive, Schedule
from tests.simulation.schedules import play_all, play_membership
from tests.simulation.shrink import play, report, shrink
from tests.simulation.violation import Violation
from tests.simulation.world import World

SEEDS = int(os.environ.get("SIMULATION_SEEDS", "1250"))
FIRST = int(os.environ.get("SIMULATION_FIRST", "0"))
ONLY = os.environ.get("SIMULATION_SEED")
PLANNED = min(SEEDS // 6, 500)
"""Schedules in which nothing goes wrong."""
SIZES = min(SEEDS // 6, 1000)
"""Schedules with a script that can use some numbers of nodes only."""


def test_every_promise_holds_in_every_schedule() -> None:
    seeds = range(FIRST, FIRST + SEEDS)
    result = play_all("membership", seeds) if ONLY is None else play_membership(int(ONLY))
    if result.failure:
        pytest.fail(result.failure, pytrace=False)
    print(f"{result.played} schedules: {seeds}")


@pytest.mark.parametrize("seed", range(20))
def test_ten_nodes_that_come_together_cost_one_further_round(seed: int) -> None:
    pending_joins = [Arrive(at=0.0, agent="node0/1", node="node0")]
    pending_joins += [
        Arrive(at=2.0 + 0.004 * index, agent=f"node{index}/1", node=f"node{index}") for index in range(1, 11)
    ]
    noise = replace(NORMAL, late=0.0) if seed % 2 else CALM
    world = World(Schedule(seed, Settings(min_nodes=1, max_nodes=16), noise, tuple(pending_joins)))
    world.settle()
    assert [len(table.places) for table in world.checks.tables.values()] == [1, 11]


@pytest.mark.parametrize("how", ["announced", "one srun"])
@pytest.mark.parametrize("seed", range(10))
def test_nodes_that_start_together_and_join_seconds_apart_cost_one_further_round(seed: int, how: str) -> None:
    rng = random.Random(seed)
    pending_joins = [Arrive(at=0.0, agent="node0/1", node="node0")]
    for index in range(1, 5):
        late = rng.uniform(0.0, 1.5)
        arrival = Arrive(at=2.0 + late, agent=f"node{index}/1", node=f"node{index}", cohort=("7.0.1", 4))
        if how == "announced":
            # One may get ready while another has not started yet, but none joins before all have said that they come.
            arrival = replace(arrival, seconds=2.0 + rng.uniform(0.0, 1.5), cohort=("", 1))
        pending_joins.append(arrival)
    noise = replace(NORMAL, late=0.0) if seed % 2 else CALM
    world = World(Schedule(seed, Settings(min_nodes=1, max_nodes=16), noise, tuple(pending_joins)))
    world.settle()
    assert [len(table.places) for table in world.checks.tables.values()] == [1, 5]


@pytest.mark.parametrize("part", range(2))
def test_leaves_and_growth_lose_no_step_when_all_take_part(part: int) -> None:
    planned = 0
    for seed in range(part, PLANNED, 2):
        schedule = draw_planned(seed)
        world = World(schedule)
        try:
            world.run()
        except Violation as violation:
            pytest.fail(report(schedule, violation), pytrace=False)
        planned += len(world.checks.planned)
        lost = {
            round_: group.furthest
            for round_, group in world.groups.items()
            # A step may end while a node says that its workers have only just started.
            if round_ in world.checks.broken_off and group.furthest > 1
        }
        assert not lost, f"seed {seed}: steps of rounds that were broken off: {lost}"
    assert planned > 2 * PLANNED, "rounds did end as planned"


@pytest.mark.parametrize("part", range(2))
def test_growth_and_loss_end_no_run_that_can_use_some_numbers_of_nodes_only(part: int) -> None:
    unusable = 0
    for seed in range(part, SIZES, 2):
        schedule = draw_sizes(seed)
        violation = play(schedule)
        if violation is not None:
            pytest.fail(report(schedule, violation), pytrace=False)
        unusable += bool(schedule.unusable)
    assert unusable > SIZES / 4


def first_violation(seeds: range) -> tuple[Schedule, Violation]:
    for seed in seeds:
        schedule = draw(seed)
        violation = play(schedule)
        if violation is not None:
            return schedule, violation
    pytest.fail(f"the simulation found nothing wrong in {len(seeds)} schedules")


def test_a_round_that_does_not_wait_for_old_workers_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    start_forming = transitions.start_forming

    def hasty(*arguments: Any, **options: Any) -> transitions.Result:
        after, decisions = start_forming(*arguments, **options)
        for agent in after.agents.values():
            if agent.status is state.Status.STOPPING:
                after = state.with_agent(after, replace(agent, status=state.Status.WAITING))
        return after, decisions

    monkeypatch.setattr(transitions, "start_forming", hasty)
    _, violation = first_violation(range(50))
    assert violation.promise == "one group trains"


def test_a_lost_node_that_is_charged_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        advance, "_inquest_due", lambda state: state.inquest and state.inquest.since + state.settings.settle_time
    )
    schedule, violation = first_violation(range(300))
    assert violation.promise == "only workers that fail by themselves are charged"
    small = shrink(schedule, violation)
    assert len(small.actions) <= 5, small.actions
    assert play(small) is not None


def test_an_agent_that_is_not_interrupted_again_is_found_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(before: state.State, event: Connected, now: float) -> state.Result:
        after, decisions = machine._connected(before, event, now)
        return after, tuple(each for each in decisions if not isinstance(each, Interrupt))

    monkeypatch.setitem(machine._HANDLERS, Connected, forgetful)
    schedule, violation = first_violation(range(600))
    assert violation.promise in ("the run does not settle", "the run does not end")
    text = report(schedule, violation)
    assert f"SIMULATION_SEED={schedule.seed}" in text
    assert "the smallest schedule found" in text
    assert re.search(r"\*\*\* [A-Z]", text)


def test_a_round_that_ends_although_more_are_on_their_way_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending_joins, "_more_to_come", lambda state: False)
    _, violation = first_violation(range(200))
    assert violation.promise == "joins that are close together make one round"


def test_stopping_at_the_earliest_answer_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planned_stop, "max", min, raising=False)
    _, violation = first_violation(range(200))
    # Whoever waits at the later step waits for ever.
    expected = ("nobody passes the agreed step", "all stop at one step", "the run does not settle")
    assert violation.promise in expected


def test_a_round_that_ends_with_the_first_that_has_stopped_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def hasty(current: state.State, now: float) -> planned_stop.Result:
        after, decisions = advance(current, now)
        stopped = any(
            agent.status is state.Status.WAITING and after.is_member(agent) for agent in after.agents.values()
        )
        if after.planned_stop is None or after.planned_stop.stop is None or not stopped:
            return after, decisions
        return planned_stop.end(after, now)

    advance = planned_stop.advance
    monkeypatch.setattr(planned_stop, "advance", hasty)
    _, violation = first_violation(range(200))
    assert violation.promise == "a planned end is not broken off without a reason"
