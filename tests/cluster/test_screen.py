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
    drain = ["slurm-elastic", "drain", str(job.id), "n4"]
    jobs.cluster.command(drain, cwd=jobs.directory, env=jobs.environ)
    job.wait_for("COMPLETED", timeout=90)

    lines = not_of_the_script(job)
    assert len(lines) <= 12, job.output
