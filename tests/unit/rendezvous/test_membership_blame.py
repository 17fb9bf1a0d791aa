"""Which rank is named when a worker hangs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slurm_elastic.rendezvous.membership import Finish, Interrupt, Ponged, Slowest
from slurm_elastic.rendezvous.membership.stragglers import who_is_behind
from tests.unit.rendezvous.scenario import Scenario, failed, only


@pytest.mark.parametrize(
    ("steps", "text"),
    [
        ({}, ""),
        ({0: 5}, ""),
        ({0: 5, 2: 5, 4: 5}, "no node is behind: 5 steps in this round everywhere"),
        ({0: 5, 2: 4, 4: 5}, "rank 2 is behind: 4 steps in this round, others 5"),
        ({4: 4, 0: 5, 2: 4}, "ranks 2, 4 are behind: 4 steps in this round, others 5"),
        (
            {**dict.fromkeys(range(10), 1), 10: 3},
            "ranks 0, 1, 2, 3, 4, 5, 6, 7, ... are behind: 1 steps in this round, others 3",
        ),
    ],
)
def test_those_with_the_fewest_steps_are_behind(steps: dict[int, int], text: str) -> None:
    assert who_is_behind([Slowest(rank, taken) for rank, taken in steps.items()]) == text


@pytest.mark.parametrize("restarts", [0, 1])
@pytest.mark.parametrize("hung", [True, False])
def test_a_hang_names_the_rank_that_is_behind_on_another_node(restarts: int, hung: bool) -> None:
    run = Scenario(min_nodes=3, max_restarts=restarts, settle_time=0.1)
    run.join("n0", "n1", "n2")
    event = failed("n0")
    run.on(replace(event, failure=replace(event.failure, message="it hangs", hung=hung)))
    for name, taken in (("n0", 8), ("n1", 5), ("n1", 5), ("n2", 8)):
        run.on(Ponged(name, run.state.probe, Slowest(int(name[1]), taken)))
    decisions = run.wait(0.2)
    said = only(Interrupt, decisions)[0].detail if restarts else only(Finish, decisions)[0].failure.message
    expected = "it hangs; rank 1 is behind: 5 steps in this round, others 8" if hung else "it hangs"
    assert said == (f"rank 3: {expected}" if restarts else expected)


@pytest.mark.parametrize("first", ["the hung one", "its peer"])
def test_a_worker_that_was_killed_because_it_hangs_is_blamed_for_the_failure_of_its_peers(first: str) -> None:
    run = Scenario(min_nodes=2, max_restarts=1, settle_time=0.1)
    run.join("n0", "n1")
    hangs, peer = failed("n1"), failed("n0")
    told = [replace(hangs, failure=replace(hangs.failure, message="it hangs", hung=True)), peer]
    for event in told if first == "the hung one" else reversed(told):
        run.on(event)
    for name, taken in (("n0", 5), ("n1", 4)):
        run.on(Ponged(name, run.state.probe, Slowest(int(name[1]), taken)))
    interrupt = only(Interrupt, run.wait(0.2))[0]
    assert (interrupt.node, interrupt.detail) == (
        "n1",
        "rank 3: it hangs; rank 1 is behind: 4 steps in this round, others 5",
    )
