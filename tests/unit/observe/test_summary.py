from __future__ import annotations

from slurm_elastic.observe.report import summary
from tests.unit.observe.runs import START, WrittenRun

A, B, C = "n1/7.0/100", "n2/7.0/200", "n3/7.0/300"


def test_a_run_with_a_loss_a_leave_and_a_join_in_one_line(run: WrittenRun) -> None:
    for agent in (A, B):
        run.started(0, agent, seconds=0)
    run.round(0.9, 0, [A, B])
    run.event(11, "n1", "node_lost", nodes=["n2"], why="", silent_for=0.3)
    run.event(11, "n1", "round_ended", round=0, reason="node_lost", nodes=["n2"], detail="")
    run.ended(12, 0, [A], 1.0, steps=1000, first_step=1, step=1000, first=0.0, last=10.0)
    run.round(12.9, 1, [A], "node_lost")
    run.ended(300, 1, [A], 13.0, steps=120, first_step=989, step=1108, first=0.0, last=287.0)
    run.event(300, "n1", "round_ended", round=1, reason="node_left", nodes=["n1"], detail="drained", step=120)
    run.round(301, 2, [A, C], "node_joined")
    run.ended(2460, 2, [A], 301.0, steps=120, first_step=1109, step=1228, first=0.0, last=2159.0)
    run.progress(2460, A, "agent_ended", exit_code=0)
    run.event(2460, "n1", "run_ended", outcome="succeeded")
    assert summary(run.records(), START + 2460) == (
        "1,228 steps in 41 min, 3 rounds, 1 node lost, 1 node left, 1 node joined, 12 steps again, goodput 100 %: "
        "slurm-elastic report 7"
    )


def test_a_job_that_went_as_a_whole_and_came_back_has_lost_no_node(run: WrittenRun) -> None:
    for agent in (A, B):
        run.started(0, agent, seconds=0)
    run.round(0.9, 0, [A, B])
    run.ended(100, 0, [A], 1.0, steps=100, first_step=1, step=100, first=0.0, last=99.0)
    run.event(100, "n1", "round_ended", round=0, reason="node_left", nodes=["n1", "n2"], detail="requeued", step=100)
    run.round(130, 1, [A, B], "requeued")
    run.ended(200, 1, [A], 130.0, steps=70, first_step=101, step=170, first=0.0, last=70.0)
    run.progress(200, A, "agent_ended", exit_code=0)
    assert summary(run.records(), START + 200).startswith("170 steps in 3 min, 2 rounds, 1 requeue, 0 steps again, ")


def test_a_script_without_the_api_has_time_and_rounds_alone(run: WrittenRun) -> None:
    run.started(0, A, seconds=0)
    run.round(0.9, 0, [A])
    run.progress(40, A, "workers_ended", round=0, seconds=38.0, workers=[{"rank": 0, "reports": False}])
    run.progress(40, A, "agent_ended", exit_code=0)
    assert summary(run.records(), START + 40) == "40 s, 1 round: slurm-elastic report 7"


def test_a_run_that_left_no_records_is_named(run: WrittenRun) -> None:
    assert summary(run.records(), START) == "0 s, 0 rounds: slurm-elastic report 7"
