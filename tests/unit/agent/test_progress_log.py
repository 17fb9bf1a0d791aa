from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from slurm_elastic.agent import progress_log
from slurm_elastic.agent.features import RunningRound
from slurm_elastic.agent.lifecycle.states import Departure, Training
from slurm_elastic.agent.progress_log import ProgressLog
from slurm_elastic.control.agent_side import WorkerProgress
from slurm_elastic.errors import ExitCode
from slurm_elastic.rendezvous.transport.messages import Assignment
from slurm_elastic.rundir import RunDir
from tests.local.waiting import eventually
from tests.unit.agent.helpers.rounds import placed

AGENT = "n1/7.0/1"


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are recorded a hundred times a second."""
    monkeypatch.setattr(progress_log, "_FIRST_PAUSE", 0.01)
    monkeypatch.setattr(progress_log, "_LONGEST_PAUSE", 0.01)


def assignment(base_rank: int) -> Assignment:
    return placed("n1", rank=base_rank // 2, workers=2)


def records(run_dir: RunDir) -> list[dict[str, Any]]:
    path = run_dir.path / "progress" / "n1.7.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def workers(boundary: int) -> Sequence[WorkerProgress]:
    return [
        WorkerProgress(0, True, boundary, 100 + boundary, 100, 0.0, False, 0.2, 101, math.nan, 100),
        WorkerProgress(1, False, 0, None, None, None, False),
    ]


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("base_rank", [0, 2])
def test_the_agent_of_rank_0_records_the_steps_while_they_are_taken(run_dir: RunDir, base_rank: int) -> None:
    log = ProgressLog(run_dir, "n1", AGENT, 2, 3)
    steps, looks = [7], []

    def progress() -> Sequence[WorkerProgress]:
        looks.append(steps[0])
        return workers(steps[0])

    log.workers_started(RunningRound(assignment(base_rank), {}, {}, progress))
    if base_rank == 0:
        eventually(lambda: len(records(run_dir)) == 3)
        # The same steps again are no record.
        eventually(lambda: len(looks) > 5)
        steps[0] = 9
        eventually(lambda: len(records(run_dir)) == 4)
    log.round_ended(workers(11))
    log.ended(ExitCode.LEFT)
    # What is written when the agent may be killed: Slurm ends the job that it requeues.
    found = records(run_dir)
    kinds = [record["event"] for record in found]
    sampled = ["progress", "progress"] if base_rank == 0 else []
    assert kinds == ["agent_started", "workers_started", *sampled, "workers_ended", "agent_ended"]
    assert {record["agent"] for record in found} == {AGENT}
    assert (found[0]["local_world_size"], found[0]["max_restarts"]) == (2, 3)
    assert found[0]["seconds"] > 0
    assert (found[1]["round"], found[1]["rank"], found[1]["local_world_size"], found[1]["world_size"]) == (
        3,
        base_rank,
        2,
        4,
    )
    if base_rank == 0:
        assert [(record["steps"], record["step"]) for record in found[2:4]] == [(7, 107), (9, 109)]
        assert (found[2]["checkpoint"], found[2]["loss"], found[2]["loss_step"]) == (100, "nan", 100)
    first, second = found[-2]["workers"]
    assert (first["rank"], first["steps"], first["step"], first["first_step"]) == (base_rank, 11, 111, 101)
    assert first["first"] <= first["last"] <= found[-2]["seconds"]
    assert second == {"rank": base_rank + 1, "reports": False}
    assert found[-1]["exit_code"] == 75


@pytest.mark.usefixtures("often")
def test_the_steps_and_the_newest_checkpoint_before_a_stop_are_recorded_once(run_dir: RunDir) -> None:
    log = ProgressLog(run_dir, "n1", AGENT, 2, 3)
    steps = [7]
    log.workers_started(RunningRound(assignment(0), {}, {}, lambda: workers(steps[0])))
    eventually(lambda: len(records(run_dir)) == 3)
    log.state_changed(Training(assignment(0)))
    steps[0] = 9
    log.state_changed(Training(assignment(0), stop_step=11, departure=Departure("", "", 0, 0)))
    steps[0] = 11
    # They save with the last step, and the next look would be due.
    time.sleep(0.05)
    log.round_ended(workers(11))
    log.ended(ExitCode.LEFT)
    assert [record["steps"] for record in records(run_dir) if record["event"] == "progress"] == [7, 9]


def test_a_disk_that_fails_is_one_line_and_stops_nothing(run_dir: RunDir, caplog: pytest.LogCaptureFixture) -> None:
    (run_dir.path / "progress").write_text("a file in the place of the directory")
    log = ProgressLog(run_dir, "n1", AGENT, 2, 3)
    log.ended(ExitCode.FINISHED)
    assert [record.message for record in caplog.records if "progress is not written" in record.message] != []
    assert len(caplog.records) == 1


def starts(log: ProgressLog, *rounds: tuple[int, int], base_rank: int = 0) -> None:
    """Rounds with these first and last steps go by."""
    for number, (first, last) in enumerate(rounds):
        placed = replace(assignment(base_rank), round=number)
        log.workers_started(RunningRound(placed, {0: 1}, {}, tuple))
        log.round_ended([WorkerProgress(0, True, last - first + 1, last, None, 0.1, False, first_step=first)])


@pytest.mark.parametrize(
    ("rounds", "told"),
    [
        ([(1, 57), (1, 9), (1, 80)], "round 1 began with step 1 again, and round 0 had come to step 57: the script"),
        ([(0, 57), (58, 90), (0, 3)], "round 2 began with step 0 again, and round 1 had come to step 90: the script"),
        ([(0, 57), (41, 90)], ""),
        ([(1, 1), (1, 9)], ""),
        ([(500, 600), (500, 700)], ""),
    ],
)
def test_a_script_that_begins_again_is_told_once(
    run_dir: RunDir, caplog: pytest.LogCaptureFixture, rounds: list[tuple[int, int]], told: str
) -> None:
    log = ProgressLog(run_dir, "n1", AGENT, 2, 3)
    starts(log, *rounds)
    log.ended(ExitCode.LEFT)
    assert [line[: len(told)] for line in caplog.messages] == [told] * bool(told)


def test_the_agent_of_rank_0_tells_it(run_dir: RunDir, caplog: pytest.LogCaptureFixture) -> None:
    log = ProgressLog(run_dir, "n1", AGENT, 2, 3)
    starts(log, (1, 57), (1, 9), base_rank=2)
    log.ended(ExitCode.LEFT)
    assert caplog.messages == []


@pytest.mark.usefixtures("often")
def test_a_script_that_could_have_finished_a_step_and_does_not_is_told_how_once(
    run_dir: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    log = ProgressLog(run_dir, "n1", AGENT, 2, 3)
    seconds: list[float | None] = [None, None]
    looks = []

    def progress() -> Sequence[WorkerProgress]:
        looks.append(1)
        return [WorkerProgress(i, True, 0, None, None, None, False, seconds_awaited=seconds[i]) for i in (0, 1)]

    def after_looks(*now: float | None) -> list[str]:
        seconds[:], before = now, len(looks)
        eventually(lambda: len(looks) > before + 6)
        return [line.partition(":")[0] for line in caplog.messages]

    log.workers_started(RunningRound(assignment(0), {}, {}, progress))
    assert after_looks(None, 59.0) == []
    assert after_looks(None, 61.0) == ["rank 1 on n1 has finished no step in 61 s"]
    assert len(after_looks(62.0, 62.0)) == 1
    log.ended(ExitCode.LEFT)
