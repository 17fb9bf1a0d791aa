from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from slurm_elastic.agent.node.claims import claim
from slurm_elastic.errors import UsageError
from tests.unit.agent.helpers.jobs import slurm_job

SECRET = bytes(32)

HOLDER = """
import sys
from slurm_elastic.agent.node.claims import claim
from tests.unit.agent.helpers.jobs import slurm_job

with claim(bytes(32), "n1", slurm_job()):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_agent_is_refused_until_the_first_one_ends() -> None:
    with claim(SECRET, "n1", slurm_job()):
        with pytest.raises(UsageError) as caught, claim(SECRET, "n1", slurm_job()):
            pass
        assert str(caught.value) == (
            "an agent of job 7 is running on n1 already; start one per node: srun --ntasks-per-node=1"
        )
    with claim(SECRET, "n1", slurm_job()):
        pass


def test_others_are_not_in_the_way() -> None:
    with (
        claim(SECRET, "n1", slurm_job()),
        claim(SECRET, "n2", slurm_job()),
        claim(SECRET, "n1", slurm_job(SLURM_JOB_ID="8")),
        claim(SECRET, "n1", slurm_job(SLURM_STEP_ID="1")),
        claim(SECRET, "n1", slurm_job(SLURM_RESTART_COUNT="1")),
        claim(b"\1" * 32, "n1", slurm_job()),
    ):
        pass


def test_outside_slurm_nothing_is_claimed() -> None:
    with claim(SECRET, "localhost", None), claim(SECRET, "localhost", None):
        pass


def test_an_agent_that_is_killed_leaves_nothing_behind() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        try:
            assert holder.stdout
            assert holder.stdout.readline() == "held\n"
            with pytest.raises(UsageError), claim(SECRET, "n1", slurm_job()):
                pass
        finally:
            holder.send_signal(signal.SIGKILL)
        assert holder.wait(10) == -signal.SIGKILL
    with claim(SECRET, "n1", slurm_job()):
        pass
