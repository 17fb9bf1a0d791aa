"""Training state in the agents' memory, on a real Slurm that loses nodes."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.cluster.jobs import CHECKOUT, DYNAMO, on
from tests.cluster.test_digits import STEPS_PER_EPOCH, steps_of_rank_0

EPOCHS = 1


@pytest.mark.nightly
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


@pytest.mark.nightly
def test_a_slow_link_makes_fewer_snapshots_safe_and_holds_up_no_step(jobs):
    jobs.place(CHECKOUT / "tests/cluster/wide_state.py")
    # n2 copies its part, of 12 MiB, to n3.
    with jobs.cluster.narrow_network("n2", "n3"):
        words = ["--snapshot-replicas=1", "wide_state.py", "--steps=200"]
        job = jobs.submit(*on("n1", "n2", "n3"), "elastic.sbatch", *words)
        slow = r"a copy of 12 MiB to n3 takes \d\d s: fewer snapshots are safe"
        job.wait_until("nobody says that a copy is slow", lambda: bool(re.search(slow, job.output)))
        jobs.cluster.kill("n2")
        job.wait_until("no second round", lambda: "start from the snapshot of step " in job.output)
    job.wait_for("COMPLETED")
    assert job.tables() == [["n1", "n2", "n3"], ["n1", "n3"]]
    assert len(re.findall(slow, job.output)) == 1
    first, second = job.output.split("start from the snapshot of step ")
    reached, safe = int(re.findall(r"took step (\d+)", first)[-1]), int(second.split(",")[0])
    print(f"step {reached} when its node was killed, went on after step {safe}")
    # A copy takes 12 s, and a step 0.1 s or somewhat more: those that were made during a copy are repeated.
    assert 1 <= safe < reached - 10, job.output
    assert f"begins after step {safe}, with parts of 3 ranks, wrong ones: []" in second
    assert "took step 200\n" in second
