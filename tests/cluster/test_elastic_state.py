"""A script with one object for its state, on a real Slurm that takes nodes away."""

from __future__ import annotations

import itertools
import json

from tests.cluster.jobs import CHECKOUT, DYNAMO, Job, on

EPOCHS = 16
STEPS_PER_EPOCH = 8


def steps_of_round(job: Job, number: int) -> list[int]:
    """The steps that rank 0 has reported in a round."""
    path = job.directory / "out" / "metrics.jsonl"
    lines = path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []
    return [line["step"] for line in map(json.loads, lines) if line["round"] == number]


def test_a_drained_node_costs_no_step_and_a_killed_one_a_step_at_most(jobs):
    jobs.place(CHECKOUT / "docs/examples/elastic_ddp.py")
    training = f"elastic_ddp.py --epochs {EPOCHS} --step-time 0.1".split()
    job = jobs.submit(*on("n1", "n2", "n3"), "elastic.sbatch", DYNAMO, *training)
    job.wait_until("no steps", lambda: len(steps_of_round(job, 0)) > 1)

    jobs.ask("drain", job.id, "n3")
    job.wait_until("n3 stays", lambda: len(steps_of_round(job, 1)) > 1)
    jobs.cluster.kill("n2")

    job.wait_for("COMPLETED")
    assert job.exit_code() == 0
    assert job.tables() == [["n1", "n2", "n3"], ["n1", "n2"], ["n1"]]
    rounds = [steps_of_round(job, number) for number in range(3)]
    assert all(after == before + 1 for steps in rounds for before, after in itertools.pairwise(steps))
    assert (rounds[0][0], rounds[2][-1]) == (1, EPOCHS * STEPS_PER_EPOCH)
    drained, killed = (after[0] - before[-1] for before, after in itertools.pairwise(rounds))
    assert drained == 1
    assert killed in (0, 1), job.output
    # A checkpoint is ten minutes away.
    assert "the workers of round 2 start from the snapshot of step " in job.output
