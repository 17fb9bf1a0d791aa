"""Nodes that leave and come with notice cost a training that uses the trainer API no step."""

from __future__ import annotations

import os
import signal
from collections import defaultdict

import pytest

from tests.cluster.jobs import SRUN, Job, outermost

COMING_AND_GOING = f"""\
#!/bin/bash
#SBATCH --nodes=3 --exclusive --nodelist=n[1-3]
options="--run-id=$SLURM_JOB_ID --nnodes=1:3"
add() {{
    {SRUN} --nodes=1 --ntasks=1 --nodelist="$1" bash agent.sh $options train.py --asks --step-time=0.1 &
}}
add n1
until ls elastic-runs/*/rounds/*.json; do sleep 0.1; done >lead.out 2>&1
add n2; add n3
until [ -e again ]; do sleep 0.1; done
add n2
wait
"""


def lost_steps(job: Job) -> dict[int, list[int]]:
    """The steps that were taken in more than one round, and in which."""
    rounds = defaultdict(set)
    for entry in job.steps():
        rounds[entry["step"]].add(entry["round"])
    assert sorted(rounds) == list(range(1, max(rounds) + 1)), "a step was left out"
    return {step: sorted(numbers) for step, numbers in rounds.items() if len(numbers) > 1}


def gap(job: Job, after: int) -> float:
    """Seconds from the last step of a round to the first of the next."""
    last = max(entry["monotonic"] for entry in job.steps(after))
    return min(entry["monotonic"] for entry in job.steps(after + 1)) - last


@pytest.mark.nightly
def test_a_node_that_leaves_and_comes_back_costs_no_step(jobs):
    jobs.write("job.sh", COMING_AND_GOING)
    job = jobs.submit("job.sh")
    job.wait_until("no full round", lambda: job.tables()[-1:] == [["n1", "n2", "n3"]])
    full = len(job.tables()) - 1
    job.wait_for_steps(full, ["n1", "n2", "n3"])

    os.kill(outermost(jobs.cluster.processes("n2"), "/slurm-elastic agent ").pid, signal.SIGTERM)
    job.wait_for_steps(full + 1, ["n1", "n3"])
    job.wait_until("n2 stays", lambda: job.exit_codes() == {"n2": 75})
    (jobs.directory / "again").touch()
    job.wait_for_steps(full + 2, ["n1", "n2", "n3"])
    job.say_enough()

    job.wait_for("COMPLETED")
    assert job.exit_codes() == {"n1": 0, "n2": 0, "n3": 0}
    assert lost_steps(job) == {}
    assert [(round_["reason"], round_["restarts"]) for round_ in job.rounds()[full:]][1:] == [
        ("node_left", 0),
        ("node_joined", 0),
    ]
    for number in (full, full + 1):
        (last,) = {max(e["step"] for e in job.steps(number) if e["rank"] == rank) for rank in range(2)}
        print(f"round {number} ended at step {last}; {gap(job, number):.2f} s to the next step")
