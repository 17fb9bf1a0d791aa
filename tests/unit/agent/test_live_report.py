from __future__ import annotations

import json
import math
from dataclasses import replace

from slurm_elastic.agent.health.pages import live_report
from slurm_elastic.agent.health.state import AgentState, Leave, Readings, RoundInfo, Stage
from slurm_elastic.control.agent_side import WorkerProgress
from slurm_elastic.observe.views import LiveAgent, LiveLeave, LiveWorker, live_run
from slurm_elastic.rendezvous.transport.messages import StatusAnswer, is_report
from tests.unit.agent.helpers.rounds import placed

START = AgentState("7", "n2", "7", "n2/7.0/1", since=10.0)


def info(workers: int) -> RoundInfo:
    return RoundInfo(placed("n2", rank=2, workers=workers, nodes=4), {local: 100 + local for local in range(workers)})


def read(text: str) -> LiveAgent:
    run = live_run(StatusAnswer("n1/7.0/1", 1, "running", 1.0, 1, 1), {"n2/7.0/1": text}, 0.1)
    assert run.problems == ()
    return run.agents["n2/7.0/1"]


def test_what_an_agent_reports_is_read_as_it_was() -> None:
    state = replace(
        START, stage=Stage.TRAINING, round_info=info(4), leave=Leave("preempted", "caf\u00e9", 32.5), hangs=1
    )
    progress = [
        WorkerProgress(0, True, 21, 120, 100, 0.5, False, 10.5, 100, math.nan, 119),
        WorkerProgress(1, True, 0, None, None, None, False),
        WorkerProgress(2, True, 21, 120, 120, 0.0, True, 10.0, 100),
        WorkerProgress(3, False, 0, None, None, None, False),
    ]
    agent = read(
        live_report(
            state, Readings(30.0, snapshot_bytes=3 << 30, safe_step=118, progress=progress), {100: "R", 101: "D"}
        )
    )
    assert (agent.state, agent.seconds, agent.round, agent.hangs) == ("training", 20.0, 3, 1)
    assert (agent.snapshot_bytes, agent.safe_step) == (3 << 30, 118)
    assert agent.leave == LiveLeave("preempted", "caf\u00e9", 2.5)
    assert agent.workers == (
        LiveWorker(8, 100, "stepping", "R", 21, 120, 100, 0.5, 2.0, "nan", 119),
        LiveWorker(9, 101, "starting", "D"),
        LiveWorker(10, 102, "stopped", "", 21, 120, 120, 0.0, 2.0),
        LiveWorker(11, 103, "unknown"),
    )


def test_before_the_first_round_there_are_no_workers() -> None:
    agent = read(live_report(START, Readings(11.0), {}))
    assert (agent.state, agent.seconds, agent.round, agent.workers) == ("starting", 1.0, None, ())
    assert (agent.snapshot_bytes, agent.safe_step) == (0, None)


def test_a_report_is_never_longer_than_the_leader_passes_on() -> None:
    state = replace(START, stage=Stage.TRAINING, round_info=info(200), leave=Leave("drained", "\u00e9" * 5000, 40.0))
    progress = [WorkerProgress(local, True, 10**9, 10**9, 10**9, 0.1, False, 10.0, 0) for local in range(200)]
    text = live_report(state, Readings(30.0, progress=progress), {})
    assert is_report(text)
    agent = read(text)
    assert len(agent.workers) > 15
    assert len(agent.workers) + agent.workers_left_out == 200


def test_reports_that_cannot_be_read_and_those_of_a_newer_release_are_a_line_each() -> None:
    reports = {
        "a": json.dumps({"state": "training", "schema": 2, "colour": "red"}),
        "b": "{",
        "c": json.dumps({"state": 7}),
        "d": "[" * 2000,
    }
    run = live_run(StatusAnswer("n1/7.0/1", 1, "running", 1.0, 4, 4), reports, 0.1)
    assert [*run.agents] == ["a"]
    assert [line.partition(":")[0] for line in run.problems] == [
        *(f"the report of {name} cannot be read" for name in "bcd"),
        "some agents are of a newer release",
    ]
