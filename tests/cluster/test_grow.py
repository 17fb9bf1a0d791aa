"""A run that gets more nodes than its first job has, gives them back, and outlives that job."""

from __future__ import annotations

import itertools
import re

import pytest

from tests.cluster.jobs import CHECKOUT, Job, Jobs, on

OLD = ["n1"]


def start(jobs: Jobs) -> Job:
    job = jobs.submit("--time=10", *on(*OLD), "elastic.sbatch", "train.py", "--asks")
    job.wait_for_steps(0, OLD)
    job.wait_until("how it was started is not kept", (job.run_dir / "command.json").exists)
    return job


def grow(jobs: Jobs, job: Job, *options: str, nodes: int = 1) -> Job:
    said = jobs.ask("grow", job.id, f"--nodes={nodes}", *options).stdout
    match = re.fullmatch(rf"submitted job (\d+) for {nodes} more nodes?; (?:it joins|they join) run {job.id}\n", said)
    assert match, said
    return Job(jobs.cluster, jobs.directory, int(match[1]))


def wait_for_round(jobs: Jobs, job: Job, number: int, nodes: list[str]) -> None:
    jobs.cluster.wait_until(f"no round {number} of {nodes}", lambda: job.trained_on(number) == nodes)


def wait_for_growth(jobs: Jobs, job: Job, number: int, more: Job) -> list[str]:
    """Wait for a round of both jobs, and return the node of the second one: of idle nodes, Slurm may choose any."""
    more.wait_for("RUNNING")
    wait_for_round(jobs, job, number, [*OLD, *more.nodes()])
    return more.nodes()


def require_each_step_once(job: Job, rounds: int) -> None:
    steps = [{entry["step"] for entry in job.steps(number)} for number in range(rounds)]
    assert [min(after) - max(before) for before, after in itertools.pairwise(steps)] == [1] * (rounds - 1)
    assert {(round_["restarts"], round_["scope"]) for round_ in job.rounds()} == {(0, f"{job.id}.0")}


def test_a_run_grows_and_shrinks_without_losing_a_step(jobs):
    """And outlives its first job, which may come back."""
    job = start(jobs)
    more = grow(jobs, job)
    new = wait_for_growth(jobs, job, 1, more)
    queue = jobs.cluster.command(["squeue", "--noheader", "--format=%j %T %D %k", f"--jobs={more.id}"]).stdout
    assert queue == f"elastic-grow RUNNING 1 slurm-elastic grows {job.run_dir}\n"

    # What has not started yet is cancelled before a node leaves.
    waiting = grow(jobs, job, "--hold")
    assert jobs.ask("resize", job.id, 1).stdout == (
        f"cancelled before their start: {waiting.id}\nasked to leave: {new[0]} (job {more.id})\n"
    )
    waiting.wait_for("CANCELLED")
    wait_for_round(jobs, job, 2, OLD)
    more.wait_for("FAILED", "COMPLETED")

    again, late = grow(jobs, job), grow(jobs, job, "--hold")
    new = wait_for_growth(jobs, job, 3, again)
    jobs.cluster.command(["scontrol", "requeue", str(job.id)])
    wait_for_round(jobs, job, 4, new)
    wait_for_round(jobs, job, 5, [*OLD, *new])
    job.cancel()
    wait_for_round(jobs, job, 6, new)
    # All scripts are told why one node goes.
    assert [entry["stop"] for entry in job.diary() if "stop" in entry and entry["round"] == 5] == ["cancelled"] * 2

    # One that starts after the end of the run has nothing to do.
    job.say_enough()
    again.wait_for("COMPLETED")
    jobs.cluster.command(["scontrol", "release", str(late.id)])
    late.wait_for("COMPLETED")
    assert f"run {job.id} is over: it needs no more nodes" in late.output
    require_each_step_once(job, 7)


@pytest.mark.nightly
def test_the_time_limit_of_the_first_job_is_its_own(jobs):
    job = start(jobs)
    more = grow(jobs, job)
    new = wait_for_growth(jobs, job, 1, more)

    jobs.cluster.command(["scontrol", "update", f"JobId={job.id}", "TimeLimit=1"])
    jobs.cluster.wait_until("it does not end", lambda: job.trained_on(2) == new, timeout=120)
    wait_for_round(jobs, job, 3, [*OLD, *new])
    assert f"job {job.id}: requeued: time limit near" in job.output

    job.finish()
    more.wait_for("COMPLETED")
    require_each_step_once(job, 4)


@pytest.mark.nightly
def test_a_run_on_an_array_grows_by_elements(jobs):
    jobs.place(CHECKOUT / "sbatch_templates/array.sbatch")
    job = jobs.submit("--array=0-1", "--time=10", "array.sbatch", "train.py", "--asks")
    wait_until = jobs.cluster.wait_until
    wait_until("no training", lambda: len(job.rounds()) > 0 and len(job.trained_on(len(job.rounds()) - 1)) == 2)
    wait_until("how it was started is not kept", (job.run_dir / "command.json").exists)
    first = len(job.rounds()) - 1

    more = grow(jobs, job, nodes=2)
    wait_until("it does not grow", lambda: len(job.trained_on(len(job.rounds()) - 1)) == 4)
    assert re.fullmatch(r"asked to leave: n\d \(job \d+\)\n", jobs.ask("shrink", job.id, "--nodes=1").stdout)
    wait_until("it does not shrink", lambda: len(job.trained_on(len(job.rounds()) - 1)) == 3)

    job.say_enough()
    jobs.wait_until_all_ended()
    # One that left is a success as well if its batch script finds the run finished.
    assert {state for state, _ in jobs.elements(more)} <= {"COMPLETED", "FAILED"}
    assert {state for state, _ in jobs.elements(job)} == {"COMPLETED"}
    steps = [{entry["step"] for entry in job.steps(number)} for number in range(first, len(job.rounds()))]
    assert {min(after) - max(before) for before, after in itertools.pairwise(steps)} == {1}
