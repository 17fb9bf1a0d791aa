"""Which rank is named when a worker hangs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slurm_elastic.rendezvous.membership import (
    Collective,
    Finish,
    Interrupt,
    Ponged,
    Probed,
    Send,
    WorkerPosition,
)
from slurm_elastic.rendezvous.membership.stragglers import find_stragglers
from slurm_elastic.rendezvous.run_events import describe
from tests.unit.rendezvous.helpers.scenario import Scenario, failed, only, sent


@pytest.mark.parametrize(
    ("steps", "text"),
    [
        ({}, ""),
        ({0: 5}, ""),
        ({0: 5, 2: 5, 4: 5}, "no worker is behind: 5 steps in this round everywhere"),
        ({0: 5, 2: 4, 4: 5}, "rank 2 is behind: 4 steps in this round, others 5"),
        ({4: 4, 0: 5, 2: 4}, "ranks 2, 4 are behind: 4 steps in this round, others 5"),
        (
            {**dict.fromkeys(range(10), 1), 10: 3},
            "ranks 0, 1, 2, 3, 4, 5, 6, 7, ... are behind: 1 steps in this round, others 3",
        ),
    ],
)
def test_those_with_the_fewest_steps_are_behind(steps: dict[int, int], text: str) -> None:
    assert find_stragglers([WorkerPosition(rank, taken) for rank, taken in steps.items()]).text == text


@pytest.mark.parametrize(
    ("positions", "text"),
    [
        (
            [WorkerPosition(0, 5, True, "train.py:7 in step"), WorkerPosition(1, 5, False, "train.py:9 in load")],
            "rank 1 is not in the collective that others wait in, after 5 steps; at train.py:9 in load",
        ),
        (
            [
                WorkerPosition(0, 5, True),
                WorkerPosition(1, 5, False, "a.py:1 in f"),
                WorkerPosition(2, 5, False, "b.py:2 in g"),
            ],
            "ranks 1, 2 are not in the collective that others wait in, after 5 steps; at a.py:1 in f, b.py:2 in g",
        ),
        # A rank that nobody waits for may do anything.
        (
            [WorkerPosition(0, 5, False), WorkerPosition(1, 5, False)],
            "no worker is behind: 5 steps in this round everywhere",
        ),
        (
            [WorkerPosition(0, 5, True), WorkerPosition(1, 5, None)],
            "no worker is behind: 5 steps in this round everywhere",
        ),
        (
            [WorkerPosition(0, 5, False, "x.py:1 in f"), WorkerPosition(1, 4, True, "train.py:9 in load")],
            "rank 1 is behind: 4 steps in this round, others 5; at train.py:9 in load",
        ),
    ],
)
def test_who_does_not_come_to_a_collective_is_named_with_its_place(positions: list[WorkerPosition], text: str) -> None:
    assert find_stragglers(positions).text == text


def at(
    rank: int, number: int, name: str = "all_reduce", *, here: bool | None = None, place: str = ""
) -> WorkerPosition:
    return WorkerPosition(rank, 5, here, place, (Collective("0", number, name),))


def in_two_groups(rank: int, pair: int, all_: int) -> WorkerPosition:
    groups = (Collective("pair", pair, "send"), Collective("all", all_, "all_gather"))
    return WorkerPosition(rank, 5, True, collectives=groups)


@pytest.mark.parametrize(
    ("positions", "ranks", "text"),
    [
        (
            [at(0, 7, here=True), at(1, 6, here=False, place="train.py:9 in load")],
            (1,),
            "rank 1 is not in the collective that others wait in (all_reduce, number 7), after 5 steps; "
            "at train.py:9 in load",
        ),
        # On GPUs no stack tells, and ranks begin several collectives ahead.
        (
            [at(0, 9), at(1, 7), at(2, 8)],
            (1,),
            "rank 1 is not in the collective that others wait in (all_reduce, number 8), after 5 steps",
        ),
        # Its process has ended in the collective: its stack is that of the end.
        (
            [at(0, 7, here=False), at(1, 6, "broadcast", here=False)],
            (1,),
            "rank 1 is not in the collective that others wait in (all_reduce, number 7), after 5 steps",
        ),
        # Rank 1 is behind in one group because it waits for rank 2 in another one.
        (
            [
                in_two_groups(0, 3, 5),
                in_two_groups(1, 4, 4),
                WorkerPosition(2, 5, False, "a.py:1 in f", (Collective("pair", 3, "send"),)),
            ],
            (2,),
            "rank 2 is not in the collective that others wait in (send, number 4), after 5 steps; at a.py:1 in f",
        ),
        (
            [
                at(0, 7, here=True, place="train.py:9 in step"),
                at(1, 7, "broadcast", here=True, place="train.py:5 in f"),
            ],
            (),
            "rank 1 is in broadcast, and others in all_reduce, both number 7 of their process group: the script calls "
            "different collectives; at train.py:5 in f, train.py:9 in step",
        ),
        # It has gone on from another one, and is elsewhere.
        (
            [at(0, 7, here=True), at(1, 7, "broadcast", here=False)],
            (1,),
            "rank 1 is not in the collective that others wait in, after 5 steps",
        ),
        ([at(0, 7), at(1, 7)], (), "no worker is behind: 5 steps in this round everywhere"),
        (
            [WorkerPosition(0, 6, True, collectives=at(0, 7).collectives), at(1, 6, here=False)],
            (1,),
            "rank 1 is behind: 5 steps in this round, others 6; they wait in a collective (all_reduce, number 7)",
        ),
    ],
)
def test_the_flight_recorder_tells_who_does_not_come(
    positions: list[WorkerPosition], ranks: tuple[int, ...], text: str
) -> None:
    for order in (positions, positions[::-1]):
        found = find_stragglers(order)
        assert (found.ranks, found.text) == (ranks, text)


@pytest.mark.parametrize("restarts", [0, 1])
@pytest.mark.parametrize("hung", [True, False])
def test_a_hang_names_the_rank_that_is_behind_on_another_node(restarts: int, hung: bool) -> None:
    run = Scenario(min_nodes=3, max_restarts=restarts, settle_time=0.1, root_wait=0.1)
    run.join("n0", "n1", "n2")
    event = failed("n0")
    run.on(replace(event, failure=replace(event.failure, message="it hangs", hung=hung)))
    for name, taken in (("n0", 8), ("n1", 5), ("n1", 5), ("n2", 8)):
        run.on(Ponged(name, run.state.probe, (WorkerPosition(int(name[1]), taken),)))
    decisions = run.wait(0.2)
    said = (
        only(Interrupt, decisions)[0].message.detail if restarts else only(Finish, decisions)[0].message.failure.message
    )
    expected = "it hangs; rank 1 is behind: 5 steps in this round, others 8, on n1" if hung else "it hangs"
    assert said == (f"rank 3: {expected}" if restarts else expected)


def test_members_are_asked_for_dumps_once_a_worker_of_any_has_waited() -> None:
    run = Scenario(min_nodes=3, max_restarts=1, settle_time=0.1, root_wait=1.0)
    run.join("n0", "n1", "n2")
    everyone = ("n0", "n1", "n2")
    peer, waited = failed("n0"), failed("n1")
    assert sent(Probed, run.on(peer)) == [Send(everyone, Probed(1))]
    run.on(Ponged("n0", 1, (WorkerPosition(0, 5, True),)))
    waited = replace(waited, failure=replace(waited.failure, timed_out=True, message="timed out"))
    assert sent(Probed, run.on(waited)) == [Send(everyone, Probed(1, dumps=True))]
    assert not sent(Probed, run.on(replace(waited, agent="n2")))
    # The first answers count.
    for name in everyone:
        run.on(Ponged(name, 1, (WorkerPosition(int(name[1]), 5, False, "late.py:1"),)))
    # Dumps take a while.
    assert not only(Interrupt, run.wait(0.5))
    assert only(Interrupt, run.wait(0.6))[0].failure is not None


def test_the_nodes_of_those_that_others_wait_for_are_known() -> None:
    run = Scenario(min_nodes=2, max_restarts=1, settle_time=0.1, root_wait=0.1)
    run.join("n0", "n1")
    event = failed("n0")
    run.on(replace(event, failure=replace(event.failure, timed_out=True, cause="collective_timeout")))
    run.on(Ponged("n0", 1, (at(0, 7),)))
    run.on(Ponged("n1", 1, (at(1, 6),)))
    interrupt = only(Interrupt, run.wait(0.2))[0]
    assert interrupt.failure is not None
    assert interrupt.failure.stragglers == ((1, "n1"),)
    entry = describe(interrupt)
    assert entry is not None
    assert entry.fields["stragglers"] == [{"rank": 1, "node": "n1"}]


@pytest.mark.parametrize("first", ["the hung one", "its peer"])
def test_a_worker_that_was_killed_because_it_hangs_is_blamed_for_the_failure_of_its_peers(first: str) -> None:
    run = Scenario(min_nodes=2, max_restarts=1, settle_time=0.1, root_wait=0.1)
    run.join("n0", "n1")
    hangs, peer = failed("n1"), failed("n0")
    told = [replace(hangs, failure=replace(hangs.failure, message="it hangs", hung=True)), peer]
    for event in told if first == "the hung one" else reversed(told):
        run.on(event)
    for name, taken in (("n0", 5), ("n1", 4)):
        run.on(Ponged(name, run.state.probe, (WorkerPosition(int(name[1]), taken),)))
    interrupt = only(Interrupt, run.wait(0.2))[0]
    assert (interrupt.message.node, interrupt.message.detail) == (
        "n1",
        "rank 3: it hangs; rank 1 is behind: 4 steps in this round, others 5, on n1",
    )
