"""The node of the leader is lost: the first node of an allocation, the next one, that of an array's first element."""

from __future__ import annotations

import itertools
import json

from tests.cluster.jobs import Job
from tests.cluster.test_node_loss import assert_nothing_is_lost, assert_one_group_at_a_time, formed


def gap(job: Job, round_number: int) -> float:
    """Seconds without a step between a round and the one before."""
    last = max(entry["monotonic"] for entry in job.steps(round_number - 1))
    return min(entry["monotonic"] for entry in job.steps(round_number)) - last


def leaders_node(job: Job) -> str:
    """Where the leader is that has formed the newest round."""
    return str(job.rounds()[-1]["leader"]).split("/")[0]


def test_the_first_node_is_killed_and_then_the_new_leaders(jobs):
    job = jobs.submit("--nodes=3", "elastic.sbatch", "train.py")
    job.wait_for_steps(0, ["n1", "n2", "n3"])

    # The batch script and srun go with it, and nobody reads any more what agents and workers print.
    jobs.cluster.kill("n1")
    first = ["n2", "n3"]
    job.wait_for_steps(1, first)
    # Nearly always the first of the others; any of them may.
    leader = leaders_node(job)
    jobs.cluster.kill(leader)
    second = [node for node in first if node != leader]
    job.wait_for_steps(2, second)
    job.say_enough()

    # Slurm would let the job run on with nothing in it.
    job.wait_for("CANCELLED")
    assert json.loads((job.run_dir / "done.json").read_text())["outcome"] == "succeeded"
    assert formed(job) == [
        (["n1", "n2", "n3"], "start", 0),
        (first, "node_lost", 0),
        (second, "node_lost", 0),
    ]
    # So do the logs; what the job prints ends with the first node.
    assert job.events("round_formed")[-1]["nodes"] == second
    assert job.events("run_ended")[-1]["outcome"] == "succeeded"
    logs = {path.parts[-3] for path in job.run_dir.glob("logs/round_0002/*/*/stdout.log")}
    assert logs == set(second)
    for before, after in itertools.pairwise(job.rounds()):
        # An epoch may be claimed in vain.
        assert after["epoch"] - before["epoch"] >= (after["leader"] != before["leader"])
    assert_one_group_at_a_time(job.steps())
    assert_nothing_is_lost(job.steps())
    print(f"seconds without a step: {gap(job, 1):.2f}, {gap(job, 2):.2f}, led by n1, {leader}, {leaders_node(job)}")
