"""A job that is cancelled while it trains."""

from __future__ import annotations

import re

import pytest

from tests.cluster.jobs import on


@pytest.mark.parametrize("start", ["warm", pytest.param("cold", marks=pytest.mark.nightly)])
@pytest.mark.proctrack("cgroup", nightly="linuxproc")
def test_a_cancelled_job_leaves_nothing_behind(jobs, proctrack, start):
    job = jobs.submit(*on("n1", "n2"), "elastic.sbatch", f"--start={start}", "train.py")
    job.wait_for_steps(0, ["n1", "n2"])

    job.cancel()

    job.wait_for("CANCELLED")
    assert not (job.run_dir / "done.json").exists()
    assert len(job.rounds()) == 1
    if proctrack == "cgroup":
        # Slurm signals its own children alone, so it was the agents that told the workers, and in time. Those of an
        # agent that was told last may have missed the others before.
        assert [e["node"] for e in job.diary() if e.get("signal") == "SIGTERM"] != []
        assert "n1 leaves: cancelled" in job.output
        for node in ("n1", "n2"):
            # The first one's agent asks Slurm, and its answer may be there before Slurm's signal is at another node.
            told = rf"\[slurm-elastic {node}\] {node} (got SIGTERM: leaving round|leaves: cancelled)"
            assert re.search(told, job.output)
