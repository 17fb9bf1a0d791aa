"""Training state in the agents' memory, on a real Slurm that loses nodes."""

from __future__ import annotations

import re

from tests.cluster.jobs import CHECKOUT, DYNAMO, on


def test_a_killed_node_takes_no_shards_with_it(jobs):
    jobs.place(CHECKOUT / "docs/examples/fsdp.py")
    # An epoch has 8 steps.
    training = ["fsdp.py", "--epochs=3", "--batch-size=64", "--step-time=0.1", "--snapshots"]
    job = jobs.submit(*on("n1", "n2", "n3"), "elastic.sbatch", DYNAMO, "--snapshot-replicas=1", *training)
    job.wait_until("no steps", lambda: "] epoch 1: " in job.output)

    jobs.cluster.kill("n2")

    job.wait_for("COMPLETED")
    assert job.tables() == [["n1", "n2", "n3"], ["n1", "n3"]]
    _, (second, _) = re.findall(r"\] step (\d+): begins with world size (\d+)", job.output)
    assert f"the workers of round 1 start from the snapshot of step {second}, taken in round 0" in job.output
    # The node was killed after step 16, two epochs. One step, and those that all make while one becomes safe, are
    # repeated.
    assert int(second) >= 6, job.output
    assert "] epoch 2: step 24" in job.output
    assert job.exit_code() == 0
