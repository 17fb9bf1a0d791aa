"""Switches, and array elements with several nodes: what fails together has ranks in a row and copies elsewhere."""

from __future__ import annotations

import os
import re

import pytest

from tests.cluster.jobs import CHECKOUT, on
from tests.cluster.test_digits import STEPS_PER_EPOCH, steps_of_rank_0
from tests.cluster.test_doctor import doctor

EPOCHS = 1
NO_BLOCKS = os.environ.get("SLURM_ELASTIC_TEST_RELEASE", "22.05") == "22.05"
TREE = pytest.param(("s0/s1", "s0/s2"), marks=pytest.mark.topology("tree"))
BLOCK = pytest.param(
    ("b1", "b2"),
    marks=[pytest.mark.topology("block"), pytest.mark.skipif(NO_BLOCKS, reason="topology/block came with Slurm 23.11")],
)


@pytest.mark.nightly
@pytest.mark.topology("tree")
def test_a_switch_that_is_lost_takes_no_shard_with_it(jobs):
    jobs.place(CHECKOUT / "docs/examples/fsdp.py")
    words = ["--snapshot-replicas=1", "fsdp.py", "--epochs=3", "--step-time=0.05", "--snapshots"]
    job = jobs.submit(*on("n1", "n2", "n3", "n4"), "elastic.sbatch", *words)
    job.wait_until("no steps", lambda: "] epoch 0: " in job.output)

    # The switch of the leader's node, in the middle of Slurm's order.
    for node in ("n1", "n3"):
        jobs.cluster.kill(node)

    # Without its batch script, which was on n1, the agents end the job.
    job.wait_for("CANCELLED")
    # The loss of n3 may be known a moment after that of n1.
    first, *between, last = job.tables()
    assert (first, last) == (["n1", "n3", "n2", "n4"], ["n2", "n4"])
    assert between in ([], [["n3", "n2", "n4"]])
    # The job's own output ends with its first node, which ran the batch script.
    (log,) = job.run_dir.glob(f"logs/round_{len(between) + 1:04}/n2/rank_00/stdout.log")
    (step,) = re.findall(r"step (\d+): begins with world size 2", log.read_text())
    assert int(step) >= 17, "the switch was lost after step 22"
    assert "epoch 2: step 66" in log.read_text()


@pytest.mark.nightly
@pytest.mark.parametrize("labels", [TREE, BLOCK])
def test_a_domain_that_is_lost_at_once_costs_a_step_at_most(jobs, labels):
    _, findings = doctor(jobs, "--nodes=4")
    (said,) = (finding["found"] for finding in findings if finding["check"] == "node.failure_domain")
    assert said == "n[1,3] in {}; n[2,4] in {}".format(*labels)
    for path in ("digits.py", "snapshot_digits.py", "count_samples.py"):
        jobs.place(CHECKOUT / "docs/examples" / path)
    training = f"snapshot_digits.py --epochs {EPOCHS} --step-time 0.05 --checkpoint-dir . --record records".split()
    job = jobs.submit(*on("n1", "n2", "n3", "n4"), "elastic.sbatch", *training)
    job.wait_until("no steps", lambda: len(steps_of_rank_0(job)) > 5)
    assert job.tables() == [["n1", "n3", "n2", "n4"]]

    for node in ("n2", "n4"):
        jobs.cluster.kill(node)

    job.wait_for("COMPLETED")
    assert job.tables()[-1] == ["n1", "n3"]
    steps = steps_of_rank_0(job)
    assert sorted(set(steps)) == list(range(1, EPOCHS * STEPS_PER_EPOCH + 1))
    # The loss of n4 may be known a moment after that of n2.
    assert len(steps) <= EPOCHS * STEPS_PER_EPOCH + len(job.tables()) - 1, job.output


@pytest.mark.nightly
@pytest.mark.nodes(8)
@pytest.mark.topology("tree")
def test_one_of_two_elements_of_four_nodes_that_is_lost_at_once_costs_a_step_for_each_round(jobs):
    jobs.place(CHECKOUT / "sbatch_templates/array.sbatch")
    for path in ("digits.py", "snapshot_digits.py", "count_samples.py"):
        jobs.place(CHECKOUT / "docs/examples" / path)
    size = "--array=0-1 --nodes=4 array.sbatch --nnodes=4:8"
    training = f"snapshot_digits.py --epochs {EPOCHS} --step-time 0.05 --checkpoint-dir . --record records"
    job = jobs.submit(*size.split(), *training.split())
    job.wait_until("not all train", lambda: job.tables() and len(job.tables()[-1]) == 8, 120)
    whole = len(job.tables()) - 1
    job.wait_until("no steps", lambda: len(steps_of_rank_0(job)) > 5, 120)

    for node in job.tables()[whole][4:]:
        jobs.cluster.kill(node)

    job.wait_until("the others do not go on", lambda: (job.run_dir / "done.json").exists(), 120)
    for number, round_ in enumerate(job.rounds()):
        domains = [place["domain"] for place in round_["places"]]
        assert domains == sorted(domains, key=domains.index), f"round {number} interleaves"
    domains = [place["domain"] for place in job.rounds()[whole]["places"]]
    assert domains == [domains[0]] * 4 + [domains[4]] * 4
    # Slurm gives an element the nodes of one switch if it can.
    assert sorted(domains[::4]) == [f"{job.id}_0/s0/s1", f"{job.id}_1/s0/s2"]
    assert job.tables()[-1] == job.tables()[whole][:4]
    steps = steps_of_rank_0(job)
    assert sorted(set(steps)) == list(range(1, EPOCHS * STEPS_PER_EPOCH + 1))
    # Nodes that are killed one after the other may be lost in several rounds.
    assert len(steps) <= EPOCHS * STEPS_PER_EPOCH + len(job.tables()) - 1 - whole, job.output
    jobs.cluster.cancel_all()
