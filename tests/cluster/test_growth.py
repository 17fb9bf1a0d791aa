"""Agents that come later, wait as spares, or take very long to start."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.conftest import remove_shared_directory, shared_directory
from tests.cluster.jobs import PATIENT, SRUN, Job, Jobs
from tests.cluster.testbed import Cluster, Settings
from tests.cluster.testbed.sessions import Session

pytestmark = pytest.mark.nightly

GROWING = f"""\
#!/bin/bash
#SBATCH --nodes=4 --exclusive
bounds="--run-id=$SLURM_JOB_ID --nnodes=1:4 --rdzv-conf=last_call_timeout=120"
add() {{
    {SRUN} --nodes="$1" --ntasks="$1" --nodelist="$2" bash agent.sh $bounds train.py &
}}
add 1 n1
until [ -e one-more ]; do sleep 0.1; done
add 1 n2
until [ -e two-more ]; do sleep 0.1; done
add 2 n3,n4
wait
"""

DIVIDING = """\
import os, runpy
world = int(os.environ["WORLD_SIZE"])
assert 16 % world == 0, f"batch 16 not divisible by {world}"
runpy.run_path("train.py", run_name="__main__")
"""

JOINING = f"""\
#!/bin/bash
#SBATCH --nodes=3 --exclusive
bounds="--run-id=$SLURM_JOB_ID --max-restarts=0"
{SRUN} --nodes=2 --ntasks=2 --nodelist=n1,n2 bash agent.sh $bounds --nnodes=2:3 dividing.py &
until [ -e one-more ]; do sleep 0.1; done
{SRUN} --nodes=1 --ntasks=1 --nodelist=n3 bash agent.sh $bounds --nnodes=1:3 dividing.py &
wait
"""

LATE = f"""\
#!/bin/bash
#SBATCH --nodes=2
{SRUN} bash -c '[ $SLURMD_NODENAME = n1 ] || sleep 65; bash agent.sh --nnodes=2 train.py --alone --steps=2'
"""


@pytest.fixture(scope="module", autouse=True)
def late(cluster_session: Session, release: str, environment: Path) -> Iterator[Job]:
    """A job on a cluster of its own, which waits while the other tests of this module run."""
    cluster = Cluster.up(Settings(f"{cluster_session.name}-late", nodes=2, release=release))
    directory = shared_directory("late")
    jobs = Jobs(cluster, directory, environment)
    jobs.environ.update(PATIENT)
    jobs.write("late.sh", LATE)
    yield jobs.submit("late.sh")
    cluster.down()
    remove_shared_directory(directory)


def test_each_arrival_costs_one_round_and_no_restart(jobs):
    jobs.write("grow.sh", GROWING)
    job = jobs.submit("grow.sh")
    job.wait_for_steps(0, ["n1"])

    (jobs.directory / "one-more").touch()
    job.wait_for_steps(1, ["n1", "n2"])
    (jobs.directory / "two-more").touch()
    job.wait_for_steps(2, ["n1", "n2", "n3", "n4"])
    job.say_enough()

    job.wait_for("COMPLETED")
    assert job.exit_codes() == {"n1": 0, "n2": 0, "n3": 0, "n4": 0}
    # Two that one srun starts cost one round, also where one imports longer than the other.
    assert job.tables() == [["n1"], ["n1", "n2"], ["n1", "n2", "n3", "n4"]]
    assert [(round_["reason"], round_["restarts"]) for round_ in job.rounds()] == [
        ("start", 0),
        ("node_joined", 0),
        ("node_joined", 0),
    ]


def test_a_node_with_which_the_script_does_not_run_becomes_a_spare(jobs):
    jobs.write("dividing.py", DIVIDING)
    jobs.write("join.sh", JOINING)
    job = jobs.submit("join.sh")
    job.wait_for_steps(0, ["n1", "n2"])

    (jobs.directory / "one-more").touch()
    job.wait_for_steps(2, ["n1", "n2"])
    job.say_enough()

    job.wait_for("COMPLETED")
    assert job.exit_codes() == {"n1": 0, "n2": 0, "n3": 0}
    assert job.tables() == [["n1", "n2"], ["n1", "n2", "n3"], ["n1", "n2"]]
    assert [round_["restarts"] for round_ in job.rounds()] == [0, 0, 0]
    assert "with 3 nodes dividing.py failed before its first step" in job.output


def test_a_spare_takes_the_place_of_a_lost_member_and_another_ends_with_the_run(jobs):
    jobs.write("job.sh", f"#!/bin/bash\n#SBATCH --no-kill --exclusive\n{SRUN} bash agent.sh --nnodes=1:2 train.py\n")
    job = jobs.submit("--nodes=4", "job.sh")
    # The first two that come are members.
    job.wait_until("no training", lambda: len(job.trained_on(0)) == 2)
    members = job.trained_on(0)
    spares = sorted({"n1", "n2", "n3", "n4"} - set(members))
    job.wait_until("no spares", lambda: {*spares} == {n for event in job.events("node_spare") for n in event["nodes"]})
    # Not n1, where the leader is.
    survivor, victim = members

    jobs.cluster.kill(victim)

    second = sorted([survivor, spares[0]])
    job.wait_for_steps(1, second)
    job.say_enough()
    job.wait_until("agents go on", lambda: len(job.exit_codes()) == 3)
    assert job.exit_codes() == dict.fromkeys(sorted([survivor, *spares]), 0)
    assert job.tables() == [members, second]
    assert [round_["restarts"] for round_ in job.rounds()] == [0, 0]
    # Slurm 24.11 counts the lost node, and this job's script asks for no verdict.
    job.wait_for("COMPLETED", "FAILED")


def test_agents_that_start_a_minute_apart_find_each_other(late):
    # This test may be the only one that runs, and the later agent has yet to be started.
    late.wait_for("COMPLETED", timeout=150)

    assert late.exit_codes() == {"n1": 0, "n2": 0}
    assert late.tables() == [["n1", "n2"]]
    assert {entry["restarts"] for entry in late.steps(0)} == {0}
