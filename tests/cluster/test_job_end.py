"""Jobs whose run is over end, also where srun waits for a task that has no end for it."""

from __future__ import annotations

import os
import re
import signal
import time

import pytest

from tests.cluster.jobs import Job, on

SOON = 10.0
"""Seconds from the end of a run to the end of its job."""


def ends_soon(job: Job) -> None:
    """End the training; the job is out of the queue soon after the run is done."""
    job.say_enough()
    job.wait_until("the run is not done", lambda: (job.run_dir / "done.json").exists())
    begun = time.monotonic()
    job.wait_for("COMPLETED", timeout=60.0)
    assert time.monotonic() - begun < SOON
    assert job.exit_code() == 0
    assert "srun does not know that" in job.output


def kill_step_daemon(job: Job, node: str) -> None:
    step = re.compile(rf"slurmstepd: \[{job.id}\.0\]")
    found = [process for process in job.cluster.processes(node, user=None) if step.search(process.command)]
    assert found != []
    for process in found:
        os.kill(process.pid, signal.SIGKILL)


def test_a_killed_step_daemon_holds_no_job(jobs):
    job = jobs.submit("--nodes=2", "elastic.sbatch", "train.py")
    job.wait_until("no training", lambda: len(job.trained_on(0)) == 2)
    kill_step_daemon(job, job.nodes()[1])
    ends_soon(job)


@pytest.mark.nightly
def test_a_job_without_batch_script_whose_last_node_died_and_is_back_ends_with_the_run(jobs):
    job = jobs.submit("--time=10", *on("n1", "n2"), "elastic.sbatch", "train.py")
    job.wait_for_steps(0, ["n1", "n2"])
    job.wait_until("how it was started is not kept", (job.run_dir / "command.json").exists)
    jobs.ask("grow", job.id, "--nodes=1")
    job.wait_for_steps(1, ["n1", "n2", "n3"])
    jobs.cluster.kill("n1")
    job.wait_until("Slurm does not miss the first node", lambda: job.nodes() == ["n2"])
    jobs.cluster.kill("n2")
    jobs.cluster.start("n2")
    job.wait_until("n3 does not go on", lambda: job.trained_on(len(job.tables()) - 1) == ["n3"])

    job.say_enough()
    job.wait_until("the run is not done", lambda: (job.run_dir / "done.json").exists())
    begun = time.monotonic()
    job.wait_for("CANCELLED", timeout=60.0)
    assert time.monotonic() - begun < SOON
    jobs.wait_until_all_ended()


def test_a_node_that_died_and_is_back_before_slurm_has_missed_it_holds_no_job(jobs):
    job = jobs.submit("--nodes=2", "elastic.sbatch", "train.py")
    job.wait_until("no training", lambda: len(job.trained_on(0)) == 2)
    last = job.nodes()[-1]
    jobs.cluster.kill(last)
    jobs.cluster.start(last)
    job.wait_for_steps(1, job.nodes()[:1])
    ends_soon(job)
