"""sbatch called inside of another job, and options that say how the tasks of a job get GPUs."""

from __future__ import annotations

import re

import pytest

from tests.cluster.jobs import SRUN, Job, on

DEVICES = """\
import os
print("GPU", os.environ["LOCAL_RANK"], "of", os.environ["LOCAL_WORLD_SIZE"], os.environ["CUDA_VISIBLE_DEVICES"])
"""
INSIDE = """\
import os, subprocess, sys
if os.environ["RANK"] == "0":
    subprocess.run(["sbatch", "--parsable", *sys.argv[1:]], stdout=open("inner", "w"), check=True)
"""
OUTER = ("--ntasks=2", "--ntasks-per-node=2", "--cpus-per-task=1", "--gpus-per-task=1", "--mem-per-cpu=100")
INNER = ("--mem=200", "elastic.sbatch", "train.py")


def inner(jobs) -> Job:
    """The job that was submitted inside of another one."""
    note = jobs.directory / "inner"
    jobs.cluster.wait_until("nothing is submitted", lambda: note.exists() and note.read_text().strip() != "", 60)
    return Job(jobs.cluster, jobs.directory, int(note.read_text()))


def finished(job: Job) -> None:
    """See the job finish."""
    job.finish()
    assert "SLURM_" not in job.output
    assert not re.search(r"^\d+: ", job.output, flags=re.MULTILINE)


def test_a_job_submitted_by_a_step_of_another_job_takes_nothing_over(jobs):
    # Of an array, so that the job inside might be taken for an element.
    words = " ".join((*on("n2"), *INNER))
    jobs.write(
        "outer.sh", f"#!/bin/bash\nsrun --label bash -c '((SLURM_PROCID)) || sbatch --parsable {words} >inner'\n"
    )
    outer = jobs.submit("--array=3", *on("n1"), *OUTER, "outer.sh")

    job = inner(jobs)

    outer.wait_for("COMPLETED")
    job.wait_for_steps(0, ["n2"])
    finished(job)
    assert job.tables() == [["n2"]]


def test_a_job_submitted_by_a_worker_of_a_run_is_preempted_and_goes_on(jobs):
    jobs.write("inside.py", INSIDE)
    words = ("elastic.sbatch", "inside.py", *on("n2"), *INNER)
    outer = jobs.submit(*on("n1"), *words, environ={"PET_MAX_RESTARTS": "9"})

    job = inner(jobs)

    outer.wait_for("COMPLETED")
    job.wait_for_steps(0, ["n2"])
    jobs.take("n2", 3).wait_for("COMPLETED")
    job.wait_for_steps(1, ["n2"])
    finished(job)
    assert job.events("run_ended")[0]["outcome"] == "succeeded"


def test_the_environment_of_a_job_that_has_ended_is_refused(jobs):
    step = f"{SRUN} bash -c 'export -p >step.env; slurm-elastic agent train.py --steps=3'"
    jobs.write("job.sh", f"#!/bin/bash\nexport -p >batch.env\n{step}\n")
    job = jobs.submit(*on("n1"), "job.sh")
    job.wait_for("COMPLETED")
    (jobs.directory / "site").mkdir()
    (jobs.directory / "site" / "torch.py").write_text("print('torch is imported')\n")

    for shell in ("batch.env", "step.env"):
        words = ["bash", "-c", f". ./{shell}; PYTHONPATH=$PWD/site:$PYTHONPATH slurm-elastic agent train.py"]
        done = jobs.cluster.command(words, machine="n1", cwd=jobs.directory, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (
            2,
            "",
            f"slurm-elastic: error: this environment is that of job {job.id}, which has ended; use a new shell, or "
            "unset all SLURM_ variables to train outside Slurm\n",
        )
    assert job.tables() == [["n1"]]


@pytest.mark.parametrize(
    "options",
    [
        ("--gpus=2", "--ntasks-per-gpu=1"),
        ("--ntasks-per-node=2", "--gpus-per-task=1"),
        ("--gpus=2", "--gpus-per-socket=1", "--sockets-per-node=1"),
        ("--gpus-per-node=2", "--gpu-bind=single:1"),
        ("--gres=gpu:2",),
    ],
    ids=" ".join,
)
@pytest.mark.nightly
def test_each_gpu_of_a_node_gets_a_worker(jobs, options):
    jobs.write("g.py", DEVICES)

    job = jobs.submit("--nodes=1", *options, "elastic.sbatch", "g.py")

    job.wait_for("COMPLETED")
    found = sorted(re.findall(r"GPU (\d) of (\d) (\S+)", job.output))
    assert [(rank, of) for rank, of, _ in found] == [("0", "2"), ("1", "2")], job.output


def test_tasks_that_are_spread_unevenly_give_each_node_its_gpus(jobs):
    template = (jobs.directory / "elastic.sbatch").read_text()
    jobs.write("elastic.sbatch", template.replace("#SBATCH --exclusive\n", ""))
    jobs.write("g.py", DEVICES)

    job = jobs.submit("--nodes=2", "--ntasks=3", "--gpus-per-task=1", "elastic.sbatch", "g.py")

    job.wait_for("COMPLETED")
    assert sorted(re.findall(r"GPU (\d) of (\d)", job.output)) == [("0", "1"), ("0", "2"), ("1", "2")], job.output
