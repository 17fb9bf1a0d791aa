"""Training state in the agents' memory, on a real Slurm that loses nodes."""

from __future__ import annotations

import re
import subprocess
import sys

from tests.cluster.jobs import CHECKOUT, on
from tests.cluster.test_digits import STEPS_PER_EPOCH, steps_of_rank_0

EPOCHS = 1


def test_a_killed_node_costs_one_step_at_most_without_any_checkpoint(jobs):
    for path in ("digits.py", "snapshot_digits.py", "count_samples.py"):
        jobs.place(CHECKOUT / "docs/examples" / path)
    training = f"snapshot_digits.py --epochs {EPOCHS} --step-time 0.05 --checkpoint-dir . --record records".split()
    job = jobs.submit(*on("n1", "n2", "n3"), "elastic.sbatch", *training)
    job.wait_until("no steps", lambda: len(steps_of_rank_0(job)) > 5)

    jobs.cluster.kill("n2")

    job.wait_for("COMPLETED")
    assert job.tables() == [["n1", "n2", "n3"], ["n1", "n3"]]
    steps = steps_of_rank_0(job)
    assert sorted(set(steps)) == list(range(1, EPOCHS * STEPS_PER_EPOCH + 1))
    assert len(steps) <= EPOCHS * STEPS_PER_EPOCH + 1, job.output
    assert "the workers of round 1 start from the snapshot of step " in job.output
    assert f"step {EPOCHS * STEPS_PER_EPOCH} is on disk: {job.directory}/snapshots" in job.output
    command = [sys.executable, "count_samples.py", "records", "checkpoint.pt"]
    counted = subprocess.run(command, cwd=job.directory, capture_output=True, text=True)
    assert counted.stdout.splitlines() == [
        f"epoch {epoch}: 1437 of 1437 samples once, exactly once" for epoch in range(EPOCHS)
    ], counted.stderr


def test_a_killed_node_takes_no_shards_with_it(jobs):
    jobs.place(CHECKOUT / "docs/examples/fsdp.py")
    training = ["fsdp.py", "--epochs=4", "--step-time=0.1", "--snapshots"]
    job = jobs.submit(*on("n1", "n2", "n3"), "elastic.sbatch", "--snapshot-replicas=1", *training)
    job.wait_until("no steps", lambda: "] epoch 1: " in job.output)

    jobs.cluster.kill("n2")

    job.wait_for("COMPLETED")
    assert job.tables() == [["n1", "n2", "n3"], ["n1", "n3"]]
    _, (second, _) = re.findall(r"\] step (\d+): begins with world size (\d+)", job.output)
    assert f"the workers of round 1 start from the snapshot of step {second}, taken in round 0" in job.output
    # The node was killed after step 44, two epochs. One step, and those that all make while one becomes safe, are
    # repeated.
    assert int(second) >= 34, job.output
    assert "] epoch 3: step 88" in job.output
    assert job.exit_code() == 0
