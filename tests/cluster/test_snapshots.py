"""Training state in the agents' memory, on a real Slurm that loses nodes."""

from __future__ import annotations

import subprocess
import sys

from tests.cluster.jobs import CHECKOUT
from tests.cluster.test_digits import STEPS_PER_EPOCH, steps_of_rank_0

EPOCHS = 1


def test_a_killed_node_costs_one_step_at_most_without_any_checkpoint(jobs):
    for path in ("digits.py", "snapshot_digits.py", "count_samples.py"):
        jobs.place(CHECKOUT / "docs/examples" / path)
    training = f"snapshot_digits.py --epochs {EPOCHS} --step-time 0.05 --checkpoint-dir . --record records".split()
    job = jobs.submit("--nodes=3", "elastic.sbatch", *training)
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
