"""A run that gets a lost node back by a job that its leader submits."""

from __future__ import annotations

import json
import time

import pytest

from tests.cluster.jobs import Job, Jobs, on


def waiting(jobs: Jobs, job: Job) -> Job | None:
    """The replacement that waits in the queue."""
    words = ["squeue", "--noheader", "--states=PENDING", "--format=%A|%j|%D|%k"]
    lines = jobs.cluster.command(words).stdout.splitlines()
    for number, name, nodes, comment in (line.split("|", 3) for line in lines):
        assert (name, nodes) == ("elastic-replace", "1")
        assert comment.startswith(f"slurm-elastic grows {job.run_dir}, replacement ")
        return Job(jobs.cluster, jobs.directory, int(number))
    return None


def wait_for_replacement(jobs: Jobs, job: Job) -> Job:
    job.wait_until("no job is submitted for the lost node", lambda: waiting(jobs, job) is not None)
    replacement = waiting(jobs, job)
    assert replacement is not None
    return replacement


def test_a_killed_node_is_replaced_and_no_job_is_left(jobs):
    job = jobs.submit("--time=10", *on("n1", "n2"), "elastic.sbatch", "--replace-lost=2", "train.py", "--asks")
    job.wait_for_steps(0, ["n1", "n2"])
    job.wait_until("costs are not told", lambda: "lost nodes are replaced: after 2 s" in job.output)
    others = [jobs.take("n3"), jobs.take("n4")]
    for other in others:
        other.wait_for("RUNNING")

    jobs.cluster.kill("n2")
    job.wait_for_steps(1, ["n1"])
    replacement = wait_for_replacement(jobs, job)
    others[0].cancel()
    job.wait_until("n3 does not train", lambda: sorted(job.trained_on(2)) == ["n1", "n3"])
    before, after = ({entry["step"] for entry in job.steps(number)} for number in (1, 2))
    assert min(after) - max(before) == 1

    # One that still waits when the run ends.
    jobs.cluster.kill("n3")
    job.wait_for_steps(3, ["n1"])
    late = wait_for_replacement(jobs, job)
    job.say_enough()
    job.wait_for("COMPLETED")
    late.wait_for("CANCELLED")
    assert f"the run is over: job {late.id}, which waits to join it, is cancelled" in job.output
    assert f"job {replacement.id} is submitted for 1 node that the run has lost, 1 of 10" in job.output
    jobs.cluster.cancel_all()


@pytest.mark.nightly
def test_the_next_leader_submits_nothing_beside_the_job_that_waits(jobs):
    job = jobs.submit("--time=10", *on("n1", "n2", "n3"), "elastic.sbatch", "--replace-lost=2", "train.py", "--asks")
    job.wait_for_steps(0, ["n1", "n2", "n3"])
    job.wait_until("costs are not told", lambda: "lost nodes are replaced: after 2 s" in job.output)
    jobs.take("n4").wait_for("RUNNING")

    jobs.cluster.kill("n3")
    job.wait_for_steps(1, ["n1", "n2"])
    replacement = wait_for_replacement(jobs, job)
    jobs.cluster.kill("n1")
    job.wait_for_steps(2, ["n2"])
    before = len(job.steps(2))
    job.wait_until("no training", lambda: len(job.steps(2)) > before + 200)
    assert [path.name for path in sorted((job.run_dir / "replacements").iterdir())] == ["000000.json", "000001.json"]

    jobs.cluster.command(["slurm-elastic", "drain", str(job.id), "--all"], cwd=jobs.directory, env=jobs.environ)
    replacement.wait_for("CANCELLED")
    job.wait_for("FAILED", "NODE_FAIL", "COMPLETED", "CANCELLED")
    jobs.cluster.cancel_all()


@pytest.mark.nightly
def test_a_controller_that_is_away_for_a_minute_gets_one_job(jobs):
    job = jobs.submit("--time=10", *on("n1", "n2"), "elastic.sbatch", "--replace-lost=2", "train.py", "--asks")
    job.wait_for_steps(0, ["n1", "n2"])
    job.wait_until("costs are not told", lambda: "lost nodes are replaced: after 2 s" in job.output)
    # A controller that is killed forgets what it has not saved.
    others = [jobs.take("n4"), jobs.take("n3", None, "--job-name=saved-taker")]
    saved = jobs.cluster.settings.state / "controller/job_state"
    job.wait_until("not saved", lambda: saved.exists() and b"saved-taker" in saved.read_bytes())
    others[1].wait_for("RUNNING")

    jobs.cluster.kill("ctl")
    jobs.cluster.kill("n2")
    away_since = time.monotonic()
    jobs.cluster.wait_until("n1 does not train", lambda: job.trained_on(1) == ["n1"])
    jobs.cluster.wait_until("no minute has passed", lambda: time.monotonic() - away_since > 60, timeout=90)
    assert job.output.count("lost nodes are replaced when Slurm answers again") == 1
    jobs.cluster.start("ctl")

    replacement = wait_for_replacement(jobs, job)
    others[1].cancel()
    job.wait_until("n3 does not train", lambda: sorted(job.trained_on(2)) == ["n1", "n3"])
    before, after = ({entry["step"] for entry in job.steps(number)} for number in (1, 2))
    assert min(after) - max(before) == 1
    results = [json.loads(path.read_text()) for path in (job.run_dir / "replaced").iterdir()]
    assert [result["job"] for result in results] == [str(replacement.id)]
    job.say_enough()
    job.wait_for("COMPLETED")
    jobs.cluster.cancel_all()
