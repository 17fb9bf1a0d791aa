"""An array is one run: every element brings a node."""

from __future__ import annotations

import json
import re

from tests.cluster.jobs import CHECKOUT, Job, on


def test_the_elements_of_an_array_are_one_run_and_do_not_interleave(jobs):
    jobs.place(CHECKOUT / "sbatch_templates/array.sbatch")

    job = jobs.submit("--array=0-1", "--nodes=2", "array.sbatch", "--nnodes=4:4", "train.py", "--steps=5")

    jobs.wait_until_all_ended()
    (table,) = job.tables()
    assert sorted(table) == ["n1", "n2", "n3", "n4"]
    assert sorted({(e["rank"], e["node"]) for e in job.steps()}) == [*enumerate(table)]
    domains = [place["domain"] for place in job.rounds()[0]["places"]]
    assert domains == [f"{job.id}_{element}" for element in (0, 0, 1, 1)]
    assert {state for state, _ in jobs.elements(job)} == {"COMPLETED"}


def test_a_store_in_a_job_of_its_own_leads_an_array_to_its_end(jobs):
    for name in ("array", "store"):
        jobs.place(CHECKOUT / f"sbatch_templates/{name}.sbatch")
    array = ("--array=0-1", "--exclude=n3", "array.sbatch", "train.py")

    store = jobs.submit(*on("n4"), "store.sbatch", "--nnodes=2:2", "--submit", *array)

    submitted = re.compile(r"submitted job (\d+);")
    store.wait_until("the run is not submitted", lambda: submitted.search(store.output) is not None)
    run = Job(jobs.cluster, jobs.directory, int(submitted.search(store.output).group(1)))
    run.run_dir = jobs.directory / f"elastic-runs/store-{store.id}"
    run.wait_for_steps(0, ["n1", "n2"])
    assert run.leader() == "n4"
    run.say_enough()
    jobs.wait_until_all_ended()
    assert {state for state, _ in jobs.elements(run)} == {"COMPLETED"}
    assert store.state() == "COMPLETED"
    assert json.loads((run.run_dir / "done.json").read_text())["outcome"] == "succeeded"
