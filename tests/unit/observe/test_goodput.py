from __future__ import annotations

import random

import pytest

from slurm_elastic.observe.goodput import Bucket, goodput, round_progress, segments
from tests.unit.observe.runs import START, WrittenRun

A, B = "n1/7.0/100", "n2/7.0/200"


def spent(run: WrittenRun, at: float) -> dict[str, float]:
    records = run.records()
    found = goodput(segments(records, START + at), round_progress(records))
    return {bucket.value: round(seconds, 3) for bucket, seconds in found.seconds.items() if seconds}


def steps(first: int, last: int, begun: float, over: float) -> dict[str, object]:
    return {"steps": last - first + 1, "first_step": first, "step": last, "first": begun, "last": over}


def test_a_run_without_changes(run: WrittenRun) -> None:
    run.started(2, A, seconds=2.0)
    run.round(3, 0, [A])
    run.ended(20.1, 0, [A], 3.1, **steps(1, 100, 1.9, 16.9))
    run.progress(21, A, "agent_ended", exit_code=0)
    # The process began at 0; workers started at 3.1, their first step was at 5, the last at 20.
    assert spent(run, 99) == {"initialization": 5.0, "productive": 15.0, "shutdown": 1.0}


def test_steps_that_are_taken_again_are_wasted(run: WrittenRun) -> None:
    for agent in (A, B):
        run.started(0, agent, seconds=0)
    run.round(0.9, 0, [A, B])
    run.event(11, "n1", "node_lost", nodes=["n2"], why="", silent_for=0.3)
    run.ended(12, 0, [A], 1.0, **steps(1, 100, 0.0, 10.0))
    run.round(12.9, 1, [A], "node_lost")
    # From the checkpoint of step 80.
    run.ended(23, 1, [A], 13.0, **steps(81, 180, 0.0, 10.0))
    run.progress(23, A, "agent_ended", exit_code=0)
    assert spent(run, 99) == {
        # Each for 1 s until its first step.
        "initialization": 2.0,
        # A fifth of 10 s on both nodes was wasted; then 10 s on one.
        "productive": 26.0,
        "wasted_progress": 4.0,
        "infrastructure_recovery": 2.0,
    }
    records = run.records()
    assert [each.redone for each in round_progress(records).values()] == [20, 0]
    assert goodput(segments(records, START + 99), round_progress(records)).redone_steps == 20


def test_a_spare_a_requeue_and_the_queue(run: WrittenRun) -> None:
    for agent in (A, B):
        run.started(0, agent, seconds=0)
    run.event(0, "n1", "node_spare", nodes=["n2"])
    run.round(0.9, 0, [A])
    run.ended(11, 0, [A], 1.0, **steps(1, 50, 1.0, 10.0))
    for agent in (A, B):
        run.progress(12, agent, "agent_ended", exit_code=75)
    again = "n3/7.1/300"
    run.started(112, again, seconds=2)
    run.round(112.9, 1, [again], "requeued")
    run.ended(123, 1, [again], 113.0, **steps(51, 60, 1.0, 9.0))
    run.progress(124, again, "agent_ended", exit_code=0)
    assert spent(run, 999) == {
        "initialization": 2.0 + 4.0,
        "productive": 9.0 + 8.0,
        "shutdown": 1.0 + 2.0,
        "spare": 12.0,
        # From the end of all to the start of the one agent.
        "queue": 98.0,
    }


def test_scripts_without_the_trainer_api_are_said_to_report_nothing(run: WrittenRun) -> None:
    run.started(1, A, seconds=1)
    run.round(1.9, 0, [A])
    run.ended(12, 0, [A], 2.0)
    run.progress(12, A, "agent_ended", exit_code=0)
    records = run.records()
    found = goodput(segments(records, START + 99), round_progress(records))
    assert spent(run, 99) == {"initialization": 2.0, "unreported": 10.0}
    assert (found.share, found.redone_steps) == (None, None)
    assert found.missing[0].startswith("steps: scripts that do not use slurm_elastic.trainer report none")


def test_scripts_that_do_not_count_their_steps(run: WrittenRun) -> None:
    run.started(1, A, seconds=1)
    run.round(1.9, 0, [A])
    run.ended(12, 0, [A], 2.0, steps=10, first_step=None, step=None, first=1.0, last=9.0)
    run.progress(12, A, "agent_ended", exit_code=0)
    records = run.records()
    found = goodput(segments(records, START + 99), round_progress(records))
    assert found.redone_steps is None
    assert any(line.startswith("wasted progress: scripts call should_stop without a step") for line in found.missing)


def test_a_run_that_goes_on_is_counted_until_now(run: WrittenRun) -> None:
    run.started(1, A, seconds=1)
    run.round(1.9, 0, [A])
    run.progress(20, A, "progress", round=0, **steps(1, 50, 1.0, 17.0))
    assert spent(run, 30) == {"initialization": 3.0, "productive": 27.0}


@pytest.mark.parametrize("seed", range(60))
def test_the_buckets_add_up_to_the_time_of_all_agents(run: WrittenRun, seed: int) -> None:
    drawn = random.Random(seed)
    lives: dict[str, tuple[float, float]] = {}
    at, step, number = 0.0, 0, 0
    agents = [f"n{index}/7.0/{index}" for index in range(1, 5)]
    for agent in agents:
        run.started(at := at + drawn.random(), agent, seconds=1.0)
        lives[agent] = (at - 1.0, at)
    for number in range(drawn.randrange(1, 6)):
        members = sorted(drawn.sample(agents, drawn.randrange(1, 5)))
        for agent in set(agents) - set(members):
            if drawn.random() < 0.5:
                run.event(at, members[0].split("/")[0], "node_spare", nodes=[agent.split("/")[0]])
        at += drawn.random()
        run.round(at, number, members)
        begun = at + 0.1
        at += drawn.random() * 20
        reports = drawn.random() < 0.8
        taken, first = drawn.randrange(100), max(1, step + 1 - drawn.randrange(5))
        length = at - begun
        if length < 0:
            at = begun
        told = {agent: {} for agent in members}
        if reports and taken and length > 0:
            begin, over = sorted(drawn.random() * length for _ in range(2))
            told = dict.fromkeys(members, steps(first, first + taken, begin, over))
            step = first + taken
        for agent in members:
            if drawn.random() < 0.9:
                run.ended(at, number, [agent], begun, **told[agent])
                lives[agent] = (lives[agent][0], at)
            else:
                lives[agent] = (lives[agent][0], begun)
    for agent in agents:
        if drawn.random() < 0.7:
            run.progress(at + 1, agent, "agent_ended", exit_code=0)
            lives[agent] = (lives[agent][0], at + 1)
        else:
            lives[agent] = (lives[agent][0], at + 5)
    records = run.records()
    found = segments(records, START + at + 5)
    total = goodput(found, round_progress(records))
    expected = sum(end - start for start, end in lives.values())
    assert total.node_seconds == pytest.approx(expected, rel=0.001)
    by_agent: dict[str, float] = {}
    for segment in sorted(found, key=lambda each: (each.agent, each.start)):
        assert segment.end > segment.start
        # Without a gap.
        assert by_agent.get(segment.agent, segment.start) == pytest.approx(segment.start, abs=1e-6)
        by_agent[segment.agent] = segment.end
    assert Bucket.QUEUE not in {segment.bucket for segment in found}
