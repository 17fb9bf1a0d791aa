"""Heterogeneous jobs: a run of all components, and one of the first alone."""

from __future__ import annotations

import pytest

from tests.cluster.jobs import SRUN

COMPONENTS = ("--nodes=2", "--nodelist=n1,n2", ":", "--nodes=1", "--nodelist=n4")


@pytest.mark.nightly
def test_one_srun_for_all_components_is_one_run(jobs):
    srun = SRUN.replace("srun ", "srun --het-group=0-1 ", 1)
    jobs.write("het.sh", f"#!/bin/bash\n{srun} slurm-elastic agent --nnodes=2:3 train.py\n")
    job = jobs.submit(*COMPONENTS, "het.sh")
    job.wait_for_steps(0, ["n1", "n2", "n4"])
    assert job.tables() == [["n1", "n2", "n4"]]
    # Slurm ends and requeues all components together: they share one fate.
    assert {place["domain"] for place in job.rounds()[0]["places"]} == {f"{job.id}"}

    job.finish()
    jobs.wait_until_all_ended()


@pytest.mark.nightly
def test_a_template_trains_on_the_first_component_and_names_the_nodes_without_an_agent(jobs):
    job = jobs.submit(*COMPONENTS, "elastic.sbatch", "train.py", "--steps=5")
    job.wait_for("COMPLETED")
    assert job.tables() == [["n1", "n2"]]
    assert "n4" in job.output
    jobs.wait_until_all_ended()
