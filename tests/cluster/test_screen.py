"""What a person reads in the output of a job whose nodes go."""

from __future__ import annotations

import re

from tests.cluster.jobs import CHECKOUT, Job

_OF_THE_SCRIPT = re.compile(r"^\[n1/0\] (fresh start|resumed at|epoch |saved step|finished after)")


def not_of_the_script(job: Job) -> list[str]:
    """The lines of a job's output that are neither the script's own nor empty."""
    return [line for line in job.lines if line.strip() and not _OF_THE_SCRIPT.match(line)]


def test_a_kill_and_a_drain_are_told_in_twelve_lines(jobs):
    # As for a user, and not for the other tests.
    del jobs.environ["PET_CONSOLE"]
    jobs.place(CHECKOUT / "docs/examples/digits.py")
    training = "digits.py --epochs=5 --step-time=0.03 --checkpoint-every=20"
    job = jobs.submit("--nodes=4", "elastic.sbatch", *training.split())
    job.wait_until("no first epoch", lambda: "epoch 0: world size 4" in job.output)
    jobs.cluster.kill("n3")
    job.wait_until("no second epoch", lambda: "epoch 1: world size 3" in job.output)
    drain = ["slurm-elastic", "drain", str(job.id), "n4", "--wait"]
    drained = jobs.cluster.command(drain, cwd=jobs.directory, env=jobs.environ).stdout.splitlines()
    assert re.fullmatch(r"n4 drained: all saved step \d+, 2 of 3 nodes go on \[round 2 in .*]", drained[1]), drained
    job.wait_for("COMPLETED", timeout=90)

    assert len(not_of_the_script(job)) <= 12, job.output


def test_a_failure_is_told_once_to_who_follows_the_job(jobs):
    jobs.environ.pop("PET_CONSOLE", None)
    jobs.write("fail.py", "import torch.distributed as dist\n\ndist.init_process_group()\nraise ValueError('bad')\n")
    words = ["slurm-elastic", "submit", "--follow", "--nodes=2", "fail.py"]
    done = jobs.cluster.command(words, cwd=jobs.directory, env=jobs.environ, check=False, timeout=120)
    assert done.returncode == 1, done.stderr
    assert done.stdout.count("ValueError: bad") == 1, done.stdout
    assert done.stdout.count("fail.py") <= 2, done.stdout
    assert "the run failed: rank " in done.stdout
    assert re.search(
        r"run \d+ has failed, its root cause is above; more: slurm-elastic logs \d+ --errors\n$", done.stdout
    )
