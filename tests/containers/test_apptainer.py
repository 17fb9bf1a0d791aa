"""Agents in an Apptainer image on a real Slurm; the batch script is outside."""

from __future__ import annotations

import json
import pwd
import re
import shlex
from pathlib import Path

from slurm_elastic import __version__
from tests.cluster.jobs import TEMPLATE, Job, Jobs
from tests.cluster.test_preemption import assert_no_step_is_lost, comes_back
from tests.cluster.testbed.settings import USER
from tests.containers.conftest import APPTAINER, BASE, VENV

HOME = pwd.getpwnam(USER).pw_dir


def apptainer(image: Path, *binds: str) -> list[str]:
    """The command that runs another one in the image, with torch of the tests' environment and munge's socket."""
    return [str(APPTAINER), "exec", *(f"--bind={each}" for each in (str(VENV), "/run/munge", *binds)), str(image)]


def submit(jobs: Jobs, image: Path, *arguments: str, binds: tuple[str, ...] = ()) -> Job:
    """Submit a run whose agents are in the image."""
    text, empty = TEMPLATE.read_text(), "\ncontainer=()\n"
    assert text.count(empty) == 1
    jobs.write("container.sbatch", text.replace(empty, f"\ncontainer=({shlex.join(apptainer(image, *binds))})\n"))
    return jobs.submit(*arguments)


def said(job: Job, prefix: str = "slurm-elastic") -> list[str]:
    return [line for line in job.lines if line.startswith(prefix)]


def test_the_image_has_the_package_and_no_scontrol(jobs, image):
    look = "command -v slurm-elastic scontrol srun; slurm-elastic --version; ls /run/munge/munge.socket.2"
    seen = jobs.cluster.command([*apptainer(image), "sh", "-c", look], machine="n1").stdout
    assert seen.splitlines() == [
        "/usr/local/bin/slurm-elastic",
        f"slurm-elastic {__version__}",
        "/run/munge/munge.socket.2",
    ]


def test_a_preempted_job_saves_in_its_containers_and_the_batch_script_requeues_it(jobs, image):
    job = submit(jobs, image, "--nodes=2-4", "--time=0", "container.sbatch", "--grace=15", "train.py", "--asks")
    job.wait_for_steps(0, ["n1", "n2", "n3", "n4"])

    high = jobs.take()

    assert len(comes_back(job)) in (2, 3)
    # Without scontrol the agents do not know why, and have --grace.
    assert re.search(r"n\d leaves: unknown, 1\d s left \(SIGTERM\)", job.output)
    assert job.output.count("requeued: preempted") == 1
    assert {round_["reason"] for round_ in job.rounds()[1:]} == {"requeued"}
    assert_no_step_is_lost(job)
    high.cancel()
    job.say_enough()
    job.wait_for("COMPLETED")
    assert job.exit_code() == 0
    assert (job.run_dir / "done.json").exists()


def test_the_agents_write_nothing_into_a_read_only_home(jobs, image):
    binds = (f"{HOME}:{HOME}:ro",)
    job = submit(jobs, image, "--nodes=2", "container.sbatch", "train.py", "--steps=5", binds=binds)
    job.wait_for("COMPLETED")
    assert said(job) == []


def test_an_image_without_the_package_ends_the_job_with_one_line(jobs, image):
    job = submit(jobs, BASE, "--nodes=2", "container.sbatch", "train.py")
    job.wait_for("FAILED")
    assert job.exit_code() == 255
    assert said(job) == [
        "slurm-elastic job-end: no agent has started, srun ended with 255; "
        f"install slurm_elastic {__version__} in the image of the agents"
    ]


def test_an_image_with_another_version_ends_the_job_with_one_line(jobs, image):
    other = jobs.write("_version.py", '__version__ = "0.0.1"\n')
    (inside,) = image.glob("usr/local/lib/python3*/dist-packages/slurm_elastic/_version.py")
    bind = f"{other}:/{inside.relative_to(image)}"
    job = submit(jobs, image, "--nodes=1", "container.sbatch", "train.py", binds=(bind,))
    job.wait_for("FAILED")
    assert job.exit_code() == 2
    assert said(job) == [
        f"slurm-elastic: error: the agents are of version 0.0.1, and the batch script has slurm-elastic {__version__}; "
        "install the same version in the image of the agents and outside"
    ]


def test_a_run_directory_that_is_read_only_in_the_container_ends_the_job_with_one_line(jobs, image):
    bind = f"{jobs.directory}:{jobs.directory}:ro"
    job = submit(jobs, image, "--nodes=1", "container.sbatch", "train.py", binds=(bind,))
    job.wait_for("FAILED")
    assert job.exit_code() == 2
    (line,) = said(job)
    assert "or give another run directory by --run-dir" in line


def test_the_doctor_looks_at_the_nodes_from_inside_the_image(jobs, image):
    text = TEMPLATE.read_text().replace("\ncontainer=()\n", f"\ncontainer=({shlex.join(apptainer(image))})\n")
    jobs.write("container.sbatch", text)
    argv = ["slurm-elastic", "doctor", "--json", "--nodes=2", "--template=container.sbatch"]
    done = jobs.cluster.command(argv, cwd=jobs.directory, env=jobs.environ, check=False, timeout=120)
    found = {each["check"]: each for each in json.loads(done.stdout)["checks"]}
    (commands, clock) = found["node.slurm_commands"], found["node.clock"]
    assert (commands["level"], len(commands["nodes"])) == ("limit", 2)
    assert commands["found"] == "scontrol and squeue get no answer"
    assert clock["level"] == "unknown"
    assert found["node.answers"]["level"] == found["network.leader_port"]["level"] == "ok"
    assert done.returncode == 1
