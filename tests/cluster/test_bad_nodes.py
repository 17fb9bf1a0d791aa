"""A node that fails its check: the run begins without it, and the next start of the job is not given it."""

from __future__ import annotations

from tests.planted_faults import planted

CHECK = "--node-check=echo no fan; ! grep -qs $SLURMD_NODENAME bad"


def test_a_node_that_fails_its_check_is_excluded_from_the_next_start(jobs):
    (jobs.directory / "bad").write_text("n2\n")
    options = ("--nnodes=1:2", "--rdzv-conf=last_call_timeout=1,heartbeat_limit=20", CHECK)
    job = jobs.submit("--nodes=2", "--exclude=n4", "--requeue", "elastic.sbatch", *options, "train.py", "--asks")
    job.wait_until("no training", lambda: job.rounds() and job.trained_on(0) == ["n1"])
    assert job.nodes() == ["n1", "n2"], "the check is to fail on the second"
    (event,) = job.events("node_check_failed")
    assert (event["nodes"], event["why"]) == (["n2"], "--node-check ended with exit code 1: no fan")

    jobs.ask("requeue", job.id)
    # On a busy machine n1 begins before n3 has joined.
    job.wait_until(
        "it does not start elsewhere", lambda: ["n1", "n3"] in map(job.trained_on, range(1, len(job.rounds())))
    )
    # The user's choice stays.
    excluded = jobs.cluster.job(job.id)["ExcNodeList"]
    assert excluded == "n[2,4]"
    assert "it excludes n4, n2 from now on: their strikes are in the events of the run" in job.output
    job.finish()
    found = job.action(excluded=excluded == "n[2,4]")
    assert found == planted("a node whose check fails, and a requeue").action
