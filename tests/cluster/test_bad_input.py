"""What a user gets wrong ends the job at once, with one line that says what to fix."""

from __future__ import annotations

from tests.cluster.jobs import SRUN, Job, on
from tests.cluster.testbed.machine import PATH

TWICE = """\
slurm-elastic agent train.py &
until [ -s steps/rank_0.jsonl ]; do sleep 0.1; done
slurm-elastic agent train.py 2>second.txt
echo $? >code
touch enough
wait $!
"""


def said(job: Job) -> list[str]:
    """What the job printed, without what srun says about its tasks."""
    return [line for line in job.lines if not line.startswith("srun: ")]


def test_a_wrong_command_line_ends_the_job_with_one_line(jobs):
    jobs.write("unreadable.py", "").chmod(0)
    # Nobody but root may write here.
    closed = jobs.directory.parent
    wrong = {
        ("unreadable.py",): "unreadable.py cannot be read by this user on NODE; fix its permissions",
        (f"--run-dir={closed}", "train.py"): "or give another run directory by --run-dir",
    }
    submitted = {argv: jobs.submit("--nodes=1", "elastic.sbatch", *argv) for argv in wrong}
    nowhere = jobs.submit("--nodes=1", "elastic.sbatch", "train.py", environ={"PATH": PATH})

    for argv, job in submitted.items():
        job.wait_for("FAILED")
        (line,) = said(job)
        assert line.startswith("slurm-elastic: error: ")
        assert wrong[argv].replace("NODE", job.nodes()[0]) in line
        assert job.exit_code() == 2, argv
    nowhere.wait_for("FAILED")
    assert said(nowhere) == [
        f"elastic.sbatch: no slurm-elastic on {nowhere.nodes()[0]}; activate its environment in the site block"
    ]
    assert nowhere.exit_code() == 2


def test_a_second_agent_on_a_node_is_refused_and_the_first_goes_on(jobs):
    jobs.write("twice.sh", TWICE)
    jobs.write("job.sh", f"#!/bin/bash\n{SRUN} bash twice.sh\n")

    job = jobs.submit(*on("n1"), "job.sh")

    job.wait_for("COMPLETED")
    assert (jobs.directory / "code").read_text() == "2\n"
    assert (jobs.directory / "second.txt").read_text() == (
        f"slurm-elastic: error: an agent of job {job.id} is running on n1 already; start one per node: "
        "srun --ntasks-per-node=1\n"
    )
    assert job.tables() == [["n1"]]
    assert job.events("run_ended")[0]["outcome"] == "succeeded"


def test_two_tasks_on_a_node_are_refused(jobs):
    jobs.write("job.sh", "#!/bin/bash\nsrun --ntasks-per-node=2 --ntasks=2 slurm-elastic agent train.py\n")

    job = jobs.submit("--nodes=1", "--ntasks=2", "job.sh")

    job.wait_for("FAILED")
    assert (
        said(job)
        == ["slurm-elastic: error: more than one task on a node; start one agent per node: srun --ntasks-per-node=1"]
        * 2
    )
    assert job.exit_code() == 2
