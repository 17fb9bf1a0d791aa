"""What a script is told when its job has to end: never more seconds, and never another cause, than is known."""

from __future__ import annotations

import pytest

from tests.cluster.jobs import Job


def told(job: Job) -> list[tuple[str, float]]:
    """The reason and the seconds left, as the scripts of all ranks were told them."""
    return [(entry["stop"], entry["seconds"]) for entry in job.diary() if "stop" in entry]


@pytest.mark.nightly
def test_a_preempted_job_is_told_the_seconds_of_its_partition_without_an_answer(jobs):
    # Slurm answers at the start, and is as good as silent from the signal on.
    scontrol = '#!/bin/bash\n[ ! -e silent ] || sleep 60\nexec /usr/bin/scontrol "$@"\n'
    jobs.write("scontrol", scontrol).chmod(0o755)
    environ = {"PATH": f"{jobs.directory}:{jobs.environ['PATH']}"}
    job = jobs.submit("--nodes=2", "--no-requeue", "elastic.sbatch", "train.py", "--asks", environ=environ)
    job.wait_until("no training", lambda: len(job.trained_on(0)) == 2)
    job.wait_until("the grace is unknown", lambda: [*job.run_dir.glob("graces/*.json")] != [])
    jobs.write("silent", "")

    high = jobs.take(job.nodes()[0])

    job.wait_until("it is not told", lambda: len(told(job)) == 2)
    reasons, seconds = zip(*told(job), strict=True)
    assert set(reasons) == {"node_left"}
    # Half of KillWait, 5 s here: Slurm may give as few.
    assert max(seconds) <= 2.5
    high.cancel()
    jobs.wait_until_all_ended()


@pytest.mark.nightly
def test_a_job_of_two_minutes_trains_until_a_save_has_to_begin(jobs):
    job = jobs.submit("-t", "2", "--nodes=1", "elastic.sbatch", "train.py", "--alone", "--asks", "--steps=1500")
    job.wait_until("no training", lambda: job.trained_on(0) != [])

    # 1500 steps of 0.05 s.
    job.wait_for("COMPLETED", timeout=150.0)
    assert jobs.cluster.job(job.id)["Restarts"] == "0"
    assert "the job trains on until 15 s are left" in job.output
