"""A run that gets a lost node back by a job that its leader submits."""

from __future__ import annotations

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
    job.finish()
    late.wait_for("CANCELLED")
    assert f"the run is over: job {late.id}, which waits to join it, is cancelled" in job.output
    assert f"job {replacement.id} is submitted for 1 node that the run has lost, 1 of 10" in job.output
    jobs.cluster.cancel_all()
