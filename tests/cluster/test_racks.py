"""Switches, and array elements with several nodes: what fails together has ranks in a row and copies elsewhere."""

from __future__ import annotations

import os

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
@pytest.mark.parametrize("labels", [TREE, BLOCK])
def test_a_domain_that_is_lost_at_once_costs_a_step_at_most(jobs, labels):
    _, findings = doctor(jobs, "--nodes=4")
    (said,) = (finding["found"] for finding in findings if finding["check"] == "slurm.topology")
    assert said.endswith(": n[1,3] in {}; n[2,4] in {}".format(*labels))
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
