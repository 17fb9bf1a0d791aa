"""Submissions that run on this machine: by several agents, and in this process."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import submitit

from slurm_elastic import DebugElasticExecutor, LocalElasticExecutor, UsageError, WorkerFailedError
from slurm_elastic.submission.job_environment import ElasticJobEnvironment
from tests.local.waiting import HANG


def _where(word: str) -> Callable[[], dict[str, Any]]:
    """A function inside of a function reaches the workers by value, as those of a notebook do."""

    def where() -> dict[str, Any]:
        print(f"{word} from {os.environ['RANK']}", flush=True)
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_WORLD_SIZE", "SUBMITIT_EXECUTOR", "SLURM_JOB_ID")
        return {name: os.environ.get(name) for name in names}

    return where


def _fail_on_second_rank() -> Callable[[], None]:
    def fail() -> None:
        if os.environ["RANK"] == "1":
            raise ValueError("told to fail")

    return fail


def test_two_agents_one_run(runs: Path) -> None:
    executor = LocalElasticExecutor(runs, max_nodes=2, workers_per_node=2)
    executor.update_parameters(timeout_min=10, slurm_partition="low")

    job = executor.submit(_where("hello"))

    values = job.results()
    assert [(value["RANK"], value["LOCAL_RANK"]) for value in values] == [
        ("0", "0"),
        ("1", "1"),
        ("2", "0"),
        ("3", "1"),
    ]
    assert {(value["WORLD_SIZE"], value["GROUP_WORLD_SIZE"]) for value in values} == {("4", "2")}
    assert {(value["SUBMITIT_EXECUTOR"], value["SLURM_JOB_ID"]) for value in values} == {("elastic", None)}
    assert job.result() == values[0]
    assert job.task(3).result() == values[3]
    assert job.task(3).stdout() == "hello from 3\n"
    # Agents show the last lines when they end, which they do when the run is finished.
    assert job._process.wait(HANG) == 0
    assert (job.stdout() or "").count("hello from") == 4
    assert job.exception() is None
    assert job.__class__(runs, job.job_id).results() == values, "known by its id alone"


def test_failure_of_a_worker(runs: Path) -> None:
    job = LocalElasticExecutor(f"{runs}/%j", workers_per_node=2).submit(_fail_on_second_rank())
    with pytest.raises(WorkerFailedError, match="ValueError: told to fail") as caught:
        job.results()
    assert (caught.value.rank, caught.value.exit_code, caught.value.node) == (1, 1, "localhost")
    assert "in fail\n" in str(caught.value)
    assert str(job.exception()) == str(caught.value)


def test_batch_of_a_script_and_a_function(runs: Path) -> None:
    executor = LocalElasticExecutor(runs)
    Path("script.py").write_text("import os, sys\nprint(*sys.argv[1:], os.environ['WORLD_SIZE'])\n")
    with executor.batch(allow_implicit_submissions=False):
        job = executor.submit_script("script.py", "--lr", "1 2")
        other = executor.submit(operator.truediv, 1, 4)
        with pytest.raises(AttributeError):
            _ = job.job_id
    assert (job.results(), other.results()) == ([None], [0.25])
    assert job.task(0).stdout() == "--lr 1 2 1\n"
    assert job.submission().function.arguments == ("--lr", "1 2")
    job._process.wait(HANG)
    assert job.state == "FINISHED"


def test_in_this_process(tmp_path: Path) -> None:
    executor = DebugElasticExecutor(tmp_path, min_nodes=2, max_nodes=4, workers_per_node=8, shape="array")
    executor.update_parameters(timeout_min=5, slurm_partition="low")
    value = executor.submit(_where("hello")).result()
    assert (value["RANK"], value["WORLD_SIZE"]) == ("0", "1")
    script = tmp_path / "script.py"
    script.write_text("import sys, pathlib\npathlib.Path(sys.argv[1]).touch()\n")
    assert executor.submit_script(script, str(tmp_path / "touched")).results() == [None]
    assert (tmp_path / "touched").exists()


@pytest.mark.parametrize(
    ("parameters", "words"), [({"tasks_per_node": 4}, "workers_per_node"), ({"nodes": 2}, "given twice")]
)
def test_parameters_that_break_the_agents(tmp_path: Path, parameters: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        LocalElasticExecutor(tmp_path, 2).update_parameters(**parameters)


def test_environment_of_submitit_in_a_worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    worker = {
        "SUBMITIT_EXECUTOR": "elastic",
        "SUBMITIT_FOLDER": str(tmp_path),
        "SLURM_ELASTIC_RUN_ID": "123-abcdef01",
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "GROUP_RANK": "2",
        "GROUP_WORLD_SIZE": "4",
    }
    for name, value in worker.items():
        monkeypatch.setenv(name, value)
    environment = ElasticJobEnvironment()
    assert isinstance(environment, submitit.JobEnvironment)
    # submitit's own test of its plugins (submitit/core/test_plugins.py, 1.5.4).
    assert type(environment)._requeue is not submitit.JobEnvironment._requeue
    assert (environment.job_id, environment.global_rank, environment.num_tasks) == ("123", 5, 8)
    assert (environment.local_rank, environment.node, environment.num_nodes) == (1, 2, 4)
    assert environment.activated()
    assert environment.paths.result_pickle == tmp_path / "123_5_result.pkl"
