"""The training example on a real Slurm that takes nodes away from it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.cluster.jobs import CHECKOUT, DYNAMO, Job

STEPS_PER_EPOCH = 45


def steps_of_rank_0(job: Job) -> list[int]:
    records = job.directory / "records.rank0.jsonl"
    lines = records.read_text().splitlines() if records.exists() else []
    return [entry["step"] for entry in map(json.loads, filter(None, lines)) if "step" in entry]


@pytest.mark.parametrize(
    ("elements", "array", "preemptions"),
    [(2, "--array=0-1 --exclude=n3,n4", 1), pytest.param(4, "--array=0-3", 3, marks=pytest.mark.nightly)],
)
def test_no_step_is_lost_and_every_sample_comes_once_through_preemptions(jobs, elements, array, preemptions):
    jobs.place(CHECKOUT / "sbatch_templates/array.sbatch")
    for path in ("docs/examples/digits.py", "docs/examples/count_samples.py", "tests/cluster/timed_digits.py"):
        jobs.place(CHECKOUT / path)
    training = "timed_digits.py --step-time 0.1 --checkpoint-every 10000 --checkpoint-dir . --record records"
    job = jobs.submit(*array.split(), "array.sbatch", DYNAMO, "--nnodes=1:4", *training.split())
    job.wait_until("not all train", lambda: bool(job.tables()) and len(job.tables()[-1]) == elements)

    takers = []
    # The leader's node first.
    for node in sorted(job.tables()[-1], key=lambda node: node != job.leader())[:preemptions]:
        before = len(steps_of_rank_0(job))
        takers.append(jobs.take(node))
        job.wait_until(f"{node} stays", lambda node=node: node not in job.tables()[-1])
        job.wait_until("the others stop", lambda before=before: len(steps_of_rank_0(job)) > before + 2)
    # All ranks have to learn it before they are there.
    epochs = len(steps_of_rank_0(job)) // STEPS_PER_EPOCH + 3
    jobs.write("epochs", str(epochs))
    job.wait_until("it does not end", (job.run_dir / "done.json").exists)
    for taker in takers:
        taker.cancel()

    jobs.wait_until_all_ended()
    assert [round_["reason"] for round_ in job.rounds()][-preemptions:] == ["node_left"] * preemptions
    assert {round_["restarts"] for round_ in job.rounds()} == {0}
    first, second = [round_["epoch"] for round_ in job.rounds()][-preemptions - 1 :][:2]
    assert second > first, "the leader has handed over"
    assert steps_of_rank_0(job) == list(range(1, epochs * STEPS_PER_EPOCH + 1))
    command = [sys.executable, "count_samples.py", "records", "checkpoint.pt"]
    counted = subprocess.run(command, cwd=job.directory, capture_output=True, text=True)
    assert counted.stdout.splitlines() == [
        f"epoch {epoch}: 1437 of 1437 samples once, exactly once" for epoch in range(epochs)
    ], counted.stderr
    assert {state for state, _ in jobs.elements(job)} == {"COMPLETED"}
