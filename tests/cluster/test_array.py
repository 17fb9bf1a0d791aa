"""An array is one run: every element brings a node."""

from __future__ import annotations

from tests.cluster.jobs import CHECKOUT


def test_the_elements_of_an_array_are_one_run(jobs):
    jobs.place(CHECKOUT / "sbatch_templates/array.sbatch")

    job = jobs.submit("--array=0-3", "array.sbatch", "--nnodes=4:4", "train.py", "--steps=5")

    jobs.wait_until_all_ended()
    assert job.tables() == [["n1", "n2", "n3", "n4"]]
    assert sorted({(e["rank"], e["node"]) for e in job.steps()}) == [(0, "n1"), (1, "n2"), (2, "n3"), (3, "n4")]
    assert {state for state, _ in jobs.elements(job)} == {"COMPLETED"}
