"""`sbatch elastic.sbatch train.py`: where it is called, what is passed on, where things are found afterwards."""

from __future__ import annotations

import shutil

import pytest


@pytest.mark.proctrack("cgroup", nightly="linuxproc")
def test_a_job_is_submitted_from_any_directory_with_options_and_arguments_for_each(jobs):
    elsewhere = jobs.directory / "a directory"
    elsewhere.mkdir()
    shutil.chown(elsewhere, "elastic", "elastic")

    job = jobs.submit(
        *("--nodes=1-2", "../elastic.sbatch", "--max-restarts=1", "--nproc-per-node", "2"),
        *("../train.py", "--steps=3", "--", "--lr", "two words", "*", "$HOME"),
        cwd=elsewhere,
    )

    job.wait_for("COMPLETED")
    nodes = job.nodes()
    assert len(nodes) == 2
    assert job.tables() == [nodes]
    steps = job.steps(0)
    assert sorted((e["step"], e["rank"], e["node"]) for e in steps) == [
        (step, rank, nodes[rank // 2]) for step in (1, 2, 3) for rank in range(4)
    ]
    assert {e["restarts"] for e in steps} == {0}
    assert all(e["words"] == ["--lr", "two words", "*", "$HOME"] for e in steps)
    assert (job.run_dir / "secret").stat().st_mode & 0o777 == 0o600
    assert (job.run_dir / "done.json").exists()
    logs = {str(path.relative_to(job.run_dir)) for path in job.run_dir.glob("logs/*/*/*/std*.log")}
    assert logs == {
        f"logs/round_0000/{nodes[rank // 2]}/rank_{rank:02d}/{stream}.log"
        for rank in range(4)
        for stream in ("stdout", "stderr")
    }
