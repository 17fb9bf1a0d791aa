"""Runs that a plain Python process of the ordinary user submits, with submitit's executor."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.jobs import CHECKOUT, Job, Jobs

pytestmark = pytest.mark.accounting

SUBMITTING = CHECKOUT / "tests/cluster/submitting.py"


class Submitting:
    """One scenario of submitting.py."""

    def __init__(self, jobs: Jobs, scenario: str) -> None:
        jobs.place(SUBMITTING)
        self._jobs = jobs
        self.process = jobs.cluster.popen(
            ["python", "submitting.py", scenario],
            cwd=jobs.directory,
            # As a user who says nothing about it; it also is one import of torch for all workers of a node.
            env={name: value for name, value in jobs.environ.items() if name != "PET_START"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def outcome(self, timeout: float = 90.0) -> dict[str, Any]:
        """What it printed at its end."""
        try:
            out, err = self.process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            # Its own process, and the one that entered the machine for it.
            os.killpg(self.process.pid, signal.SIGKILL)
            out, err = self.process.communicate()
            pytest.fail(f"no end after {timeout} s:\n{out}\n{err}\n{self._jobs.running()}")
        assert self.process.returncode == 0, err
        found: dict[str, Any] = json.loads(out)
        return found


def _submitted(jobs: Jobs) -> Job:
    """The job that the scenario has submitted; its run lives in the executor's folder."""
    note = jobs.directory / "job_id"
    jobs.cluster.wait_until("not submitted", lambda: note.exists() and note.read_text() != "")
    return Job(jobs.cluster, jobs.directory / "runs", int(note.read_text()))


def test_results_of_functions_and_scripts(jobs: Jobs) -> None:
    seen = Submitting(jobs, "results").outcome()
    values = seen["function"]
    assert [value["rank"] for value in values] == [0, 1, 2, 3]
    assert {value["total"] for value in values} == {6.0}
    assert {value["word"] for value in values} == {"hello"}
    assert len({value["node"] for value in values}) == 2
    assert (seen["first"], seen["third"]) == (values[0], values[2])
    assert seen["own output"] == "rank 3 trained\n"
    assert [line.partition("] ")[2] for line in seen["output"]] == [f"rank {rank} trained" for rank in range(4)]
    assert seen["exception"] is None
    assert seen["script"] == [None] * 2
    assert [line.partition("] ")[2] for line in seen["printed"]] == ["argv --lr 1e-3 of 2"] * 2
    assert seen["states"] == ["COMPLETED", "COMPLETED"]


def test_failure_arrives_with_rank_and_traceback(jobs: Jobs) -> None:
    seen = Submitting(jobs, "failure").outcome()
    assert (seen["rank"], seen["exit_code"], seen["state"]) == (1, 1, "FAILED")
    assert f"rank 1 on {seen['node']} ended with exit code 1" in seen["text"]
    assert seen["text"].count("Traceback") == 1
    assert "in fail_on_last\n" in seen["text"]
    assert "ValueError: told to fail\n" in seen["text"]
    assert seen["exception"] == seen["text"]


def test_cancel(jobs: Jobs) -> None:
    seen = Submitting(jobs, "cancel").outcome()
    assert seen["done"]
    assert seen["state"].startswith("CANCELLED")
    assert "ended in state CANCELLED" in seen["exception"]
    # Accounting knows before the nodes are free.
    jobs.cluster.wait_until("still ending", lambda: jobs.running() == "")


def test_array_is_one_run_and_goes_on_without_a_preempted_element(jobs: Jobs) -> None:
    submitting = Submitting(jobs, "array")
    job = _submitted(jobs)
    jobs.cluster.wait_until("no round of two", lambda: [len(table) for table in job.tables()][-1:] == [2])
    before = len(job.tables())
    logs = [jobs.directory / f"runs/{job.id}_{element}_log.out" for element in (0, 1)]
    jobs.cluster.wait_until("not counting", lambda: "rank 1 of 2 counts" in "".join(map(Path.read_text, logs)))
    victim = next(node for node in reversed(job.tables()[-1]) if node != job.leader())
    preemptor = jobs.take(victim)
    jobs.cluster.wait_until("no smaller round", lambda: [len(table) for table in job.tables()][before:][:1] == [1])
    (jobs.directory / "look").touch()
    jobs.cluster.wait_until("it does not end", (job.run_dir / "done.json").exists)
    preemptor.cancel()
    seen = submitting.outcome()
    assert seen["before"] == "RUNNING"
    assert [value["RANK"] for value in seen["results"]] == ["0"]
    assert victim not in {value["SLURM_ELASTIC_NODE"] for value in seen["results"]}
    # The element that was preempted starts again and finds the run finished.
    assert seen["state"] == "COMPLETED"
    assert "rank 1 of 2 counts" in seen["output"]
    assert "rank 0 of 1 counts" in seen["output"]


def test_preempted_run_comes_back_with_its_result(jobs: Jobs) -> None:
    submitting = Submitting(jobs, "preempted")
    job = _submitted(jobs)
    jobs.cluster.wait_until("no round of two", lambda: [len(table) for table in job.tables()] == [2])
    jobs.cluster.wait_until("not counting", (jobs.directory / "count.json").exists)
    preemptor = jobs.take("n2", 3)
    preemptor.wait_for("COMPLETED", timeout=90)
    job.wait_until("no second start", lambda: len(job.tables()) == 2, timeout=90)
    (jobs.directory / "enough").touch()
    seen = submitting.outcome()
    assert seen["state"] == "COMPLETED"
    assert seen["result"]["starts"] == 2
    assert seen["result"]["SLURM_ELASTIC_REASON"] == "requeued"
    # The grace is that of the quality of service, as the partition's is 15 s.
    assert "(grace of 20 s)" in json.loads((job.run_dir / "notices" / f"{job.id}.0.json").read_text())["text"]
