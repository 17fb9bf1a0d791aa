from __future__ import annotations

import random

import pytest

from slurm_elastic.observe.goodput import Bucket, Goodput, goodput, round_progress, segments
from tests.unit.observe.runs import START, WrittenRun

A, B = "n1/7.0/100", "n2/7.0/200"


def spent(run: WrittenRun, at: float) -> dict[str, float]:
    records = run.records()
    found = goodput(segments(records, START + at), round_progress(records))
    return {bucket.value: round(seconds, 3) for bucket, seconds in found.seconds.items() if seconds}


def counted(run: WrittenRun) -> Goodput:
    records = run.records()
    return goodput(segments(records, START + 99), round_progress(records))


def begun(run: WrittenRun, *agents: str) -> None:
    """A round of these agents, from 1 s after their start on."""
    for agent in agents:
        run.started(0, agent, seconds=0)
    run.round(0.9, 0, list(agents))


def steps(first: int, last: int, begun: float, over: float) -> dict[str, object]:
    return {"steps": last - first + 1, "first_step": first, "step": last, "first": begun, "last": over}


def test_a_run_without_changes(run: WrittenRun) -> None:
    run.started(2, A, seconds=2.0)
    run.round(3, 0, [A])
    run.ended(20.1, 0, [A], 3.1, **steps(1, 100, 1.9, 16.9))
    run.progress(21, A, "agent_ended", exit_code=0)
    # The process began at 0; workers started at 3.1, their first step was at 5, the last at 20.
    assert spent(run, 99) == {"initialization": 5.0, "productive": 15.0, "shutdown": 1.0}


def test_an_agent_ends_with_its_process(run: WrittenRun) -> None:
    run.started(2, A, seconds=2.0)
    run.started(2, B, seconds=2.0)
    run.event(5, "n1", "node_spare", nodes=["n2"])
    run.round(3, 0, [A])
    run.ended(20.1, 0, [A], 3.1, **steps(1, 100, 1.9, 16.9))
    for agent, left, over in ((A, 20.2, 20.7), (B, 20.2, 20.9)):
        # When it has left the run, and when its process ends.
        for at in (left, over):
            run.progress(at, agent, "agent_ended", exit_code=0)
    found = segments(run.records(), START + 99)
    assert spent(run, 99) == {"initialization": 10.0, "productive": 15.0, "spare": 15.2, "shutdown": 1.4}
    assert {segment.agent: round(segment.end - START, 3) for segment in found} == {A: 20.7, B: 20.9}


@pytest.mark.parametrize("requeued", [False, True])
def test_an_agent_that_is_killed_before_it_has_joined_ends_with_its_record(run: WrittenRun, requeued: bool) -> None:
    run.started(2, A, seconds=2.0)
    run.round(3, 0, [A])
    run.started(10, B, seconds=4.0)
    if requeued:
        run.started(32, "n2/7.1/201", seconds=4.0)
        run.event(33, "n1", "node_spare", nodes=["n2"])
        run.event(38, "n1", "node_lost", nodes=["n2"], why="", silent_for=0.3)
    run.ended(40.1, 0, [A], 3.1, **steps(1, 100, 1.9, 36.9))
    run.progress(40.1, A, "agent_ended", exit_code=0)
    run.event(40.1, "n1", "run_ended", outcome="succeeded")
    ends = {segment.agent: round(segment.end - START, 3) for segment in segments(run.records(), START + 99)}
    assert ends[B] == 10
    # This one waited as a spare, and was lost.
    assert ends.get("n2/7.1/201") == (38 if requeued else None)


def test_a_round_whose_agents_are_all_lost_may_have_taken_more_steps(run: WrittenRun) -> None:
    begun(run, A)
    run.progress(8, A, "progress", round=0, **steps(1, 70, 0.0, 7.0))
    assert [each.complete for each in round_progress(run.records()).values()] == [True], "it goes on"
    run.started(30, B, seconds=0)
    run.round(31, 1, [B], "node_lost")
    run.ended(42, 1, [B], 31.0, **steps(61, 160, 0.0, 10.0))
    progress = round_progress(run.records())
    assert [(each.complete, each.redone) for each in progress.values()] == [(False, 10), (True, 0)]
    found = goodput(segments(run.records(), START + 99), progress)
    assert found.redone_steps == 10
    assert any("steps that were taken again: all agents of round 0 were lost" in line for line in found.missing)


def test_a_lost_leader_ends_when_another_one_leads(run: WrittenRun) -> None:
    next_a = "n1/7.1/300"
    begun(run, A, B)
    run.event(11, "n2", "leader_changed", nodes=["n1"])
    run.ended(12, 0, [B], 1.0, **steps(1, 100, 0.0, 10.0))
    run.progress(20, B, "agent_ended", exit_code=75)
    # Its process began at 18.
    run.started(20, next_a, seconds=2.0)
    run.progress(20, next_a, "agent_ended", exit_code=75)
    found = segments(run.records(), START + 99)
    ends = {agent: max(each.end for each in found if each.agent == agent) - START for agent in (A, B, next_a)}
    assert ends == {A: 11, B: 20, next_a: 20}


def test_a_lost_agent_ends_before_its_job_starts_again(run: WrittenRun) -> None:
    begun(run, A)
    run.event(17, "n1", "node_spare", nodes=["n3"])
    run.event(19, "n1", "node_spare", nodes=["n3"])
    run.started(20, "n1/7.1/300", seconds=2.0)
    found = segments(run.records(), START + 99)
    assert max(each.end for each in found if each.agent == A) - START == 17


def test_a_restart_from_the_newest_checkpoint_at_each_change_would_have_repeated_steps(run: WrittenRun) -> None:
    begun(run, A)
    run.progress(6, A, "progress", round=0, **steps(1, 51, 0.0, 5.0), checkpoint=40)
    # When the workers were told to stop; with the last step they have saved, too.
    run.progress(10.9, A, "progress", round=0, **steps(1, 99, 0.0, 9.9), checkpoint=80)
    run.event(11, "n1", "round_ended", round=0, reason="node_joined", nodes=["n2"], detail="", step=100)
    run.ended(11, 0, [A], 1.0, **steps(1, 100, 0.0, 10.0), checkpoint=100)
    run.round(11.9, 1, [A], "node_joined")
    # It saved nothing before it was told to stop.
    run.event(17, "n1", "round_ended", round=1, reason="node_joined", nodes=["n2"], detail="", step=50)
    run.ended(17, 1, [A], 12.0, **steps(101, 150, 0.0, 5.0), checkpoint=150)
    run.round(17.9, 2, [A], "node_joined")
    run.event(23, "n1", "round_ended", round=2, reason="worker_failed", nodes=["n1"], detail="")
    run.ended(23, 2, [A], 18.0, **steps(151, 200, 0.0, 5.0))
    run.round(23.9, 3, [A], "worker_failed")
    run.event(34, "n1", "round_ended", round=3, reason="drained", nodes=["n1"], detail="", step=99)
    run.ended(34, 3, [A], 24.0, **steps(191, 290, 0.0, 10.0))
    run.progress(34, A, "agent_ended", exit_code=75)
    records = run.records()
    progress = round_progress(records)
    # The failure cost ten; what comes after the last round is not known.
    assert [(each.unsaved, each.redone) for each in progress.values()] == [(20, 0), (50, 0), (None, 10), (None, 0)]
    found = goodput(segments(records, START + 99), progress)
    assert found.without_planned_stops == (80, pytest.approx(2.0 + 5.0))
    assert found.share == pytest.approx((10 + 5 + 4 + 10) / 34)
    assert found.share_without_planned_stops == pytest.approx((10 + 5 + 4 + 10 - 7) / 34)


def use(waiting: float | None, loading: float, saving: float, restoring: float) -> dict[str, float | None]:
    return {"waiting": waiting, "loading": loading, "saving": saving, "restoring": restoring}


def test_measured_time_has_buckets_of_its_own(run: WrittenRun) -> None:
    begun(run, A, B)
    measured = {"before_first": use(0.5, 0.2, 0, 1.0), "since_first": use(3.0, 1.0, 2.0, 0.0)}
    run.ended(15, 0, [A, B], 1.0, **steps(1, 100, 2.0, 12.0), **measured)
    for agent in (A, B):
        run.progress(15, agent, "agent_ended", exit_code=0)
    assert spent(run, 99) == {
        # Each 1 s until its workers run, and 2 s until the first step.
        "initialization": 2 * (1.0 + 2.0 - 1.2),
        "checkpoint_restore": 2.0,
        "data_loading": 2 * (0.2 + 1.0),
        "productive": 2 * (10.0 - 6.0),
        "collectives": 6.0,
        "checkpoint_save": 4.0,
        "shutdown": 4.0,
    }
    found = counted(run)
    assert found.share == pytest.approx((8 + 6) / 30), "waiting in collectives is part of the steps"
    assert found.missing == ("queue before the first start of a job: only Slurm's accounting knows it",)


def test_of_a_lost_agent_the_time_is_cut_like_that_of_the_others(run: WrittenRun) -> None:
    begun(run, A, B)
    run.event(11, "n1", "node_lost", nodes=["n2"], why="", silent_for=0.3)
    measured = {"before_first": use(0.0, 0.0, 0, 0.0), "since_first": use(2.0, 1.0, 0.0, 0.0)}
    run.ended(12, 0, [A], 1.0, **steps(1, 100, 0.0, 10.0), **measured)
    run.progress(12, A, "agent_ended", exit_code=0)
    assert spent(run, 99) == {
        "initialization": 2.0,
        "productive": 2 * 7.0,
        "collectives": 2 * 2.0,
        "data_loading": 2 * 1.0,
        "shutdown": 1.0,
    }


def test_of_steps_that_are_taken_again_all_is_wasted(run: WrittenRun) -> None:
    begun(run, A)
    measured = {"before_first": use(0, 0, 0, 0), "since_first": use(2.0, 1.0, 0.0, 0.0)}
    run.ended(11, 0, [A], 1.0, **steps(1, 100, 0.0, 10.0), **measured)
    run.round(11.9, 1, [A], "worker_failed")
    run.ended(22, 1, [A], 12.0, **steps(51, 150, 0.0, 10.0), **measured)
    run.progress(22, A, "agent_ended", exit_code=0)
    assert spent(run, 99) == {
        "initialization": 1.0,
        "productive": 0.5 * 7.0 + 7.0,
        "collectives": 0.5 * 2.0 + 2.0,
        "data_loading": 0.5 * 1.0 + 1.0,
        "wasted_progress": 5.0,
        "infrastructure_recovery": 1.0,
    }


def test_what_comes_after_the_last_step_takes_no_time_of_the_steps_away(run: WrittenRun) -> None:
    begun(run, A)
    # The last checkpoint took longer than all steps.
    run.ended(41, 0, [A], 1.0, **steps(1, 100, 0.0, 10.0), before_first=None, since_first=use(0, 10.0, 30.0, 0))
    run.progress(42, A, "agent_ended", exit_code=0)
    assert spent(run, 99) == {"initialization": 1.0, "data_loading": 2.5, "checkpoint_save": 7.5, "shutdown": 31.0}


def test_what_is_not_measured_is_said(run: WrittenRun) -> None:
    begun(run, A)
    run.ended(12, 0, [A], 1.0, **steps(1, 10, 0.0, 10.0), before_first=None, since_first=None)
    run.round(12.9, 1, [A], "worker_failed")
    on_gpu = {"before_first": use(None, 0, 0, 0), "since_first": use(None, 5.0, 0, 0)}
    run.ended(24, 1, [A], 13.0, **steps(11, 20, 0.0, 10.0), **on_gpu)
    run.progress(24, A, "agent_ended", exit_code=0)
    found = counted(run)
    not_measured, unknown, _ = found.missing
    assert not_measured.startswith("data loading, checkpoint save and restore, collectives: not measured in round 0, ")
    assert unknown == "collectives: unknown on GPUs, in round 1; part of the steps that counted"
    assert (found.seconds[Bucket.DATA_LOADING], found.seconds[Bucket.COLLECTIVES]) == (pytest.approx(5.0), 0)


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
    found = counted(run)
    assert spent(run, 99) == {"initialization": 2.0, "unreported": 10.0}
    assert (found.share, found.redone_steps) == (None, None)
    assert found.missing[0].startswith(
        "steps, checkpoints, data loading, collectives: scripts that do not use slurm_elastic.trainer report none"
    )


def test_scripts_that_do_not_count_their_steps(run: WrittenRun) -> None:
    run.started(1, A, seconds=1)
    run.round(1.9, 0, [A])
    run.ended(12, 0, [A], 2.0, steps=10, first_step=None, step=None, first=1.0, last=9.0)
    run.progress(12, A, "agent_ended", exit_code=0)
    found = counted(run)
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
            measured = {
                name: use(drawn.choice([None, drawn.random() * length]), *(drawn.random() * length for _ in range(3)))
                for name in ("before_first", "since_first")
                if drawn.random() < 0.8
            }
            told = {agent: {**steps(first, first + taken, begin, over), **measured} for agent in members}
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
