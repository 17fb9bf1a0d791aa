"""A worker fails by itself: once, or for good."""

from __future__ import annotations

import re

import pytest

from tests.cluster.jobs import Job


@pytest.mark.proctrack("cgroup", nightly="linuxproc")
def test_a_worker_that_fails_for_good_fails_the_job_and_is_named_once(jobs):
    # What is printed is for a user, and not for the other tests.
    del jobs.environ["PET_CONSOLE"]
    followed = jobs.ask("submit", "--follow", "--nodes=2", "train.py", "--fail=1", check=False, timeout=120)
    assert followed.returncode == 1, followed.stderr
    assert followed.stdout.count("RuntimeError: rank 1 fails as it was told to") == 1, followed.stdout
    assert "the run failed: rank 1 " in followed.stdout

    job = Job(jobs.cluster, jobs.directory, int(re.findall(r"run (\d+) has failed", followed.stdout)[-1]))
    job.wait_for("FAILED")
    assert job.exit_code() == 1
    nodes = job.nodes()
    log = job.run_dir / f"logs/round_0000/{nodes[1]}/rank_01/stderr.log"
    said = job.lines
    (start,) = (number for number, line in enumerate(said) if f"rank 1 on {nodes[1]} ended with exit code 1" in line)
    told = said[start + 1 : said.index(f"the rest: {log}")]
    assert told[0] == "  Traceback (most recent call last):"
    assert told[-1].endswith("RuntimeError: rank 1 fails as it was told to")
    # Last of all, after what srun says about its tasks.
    name = job.run_dir.name
    assert said[-1].endswith(
        f"run {name} has failed, its root cause is above; more: slurm-elastic logs {name} --errors"
    )
    assert "RuntimeError: rank 1 fails as it was told to" in log.read_text()
    (ended,) = job.events("run_ended")
    assert (ended["outcome"], ended["nodes"], ended["rank"]) == ("failed", [nodes[1]], 1)
    assert not (job.run_dir / "done.json").exists()
