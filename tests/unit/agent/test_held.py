"""Elements of an array that Slurm holds are cancelled at the end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from slurm_elastic.slurm import Controller
from tests.unit.agent.helpers.jobs import at_end, slurm_job

SHOWN = """\
JobId=1 ArrayJobId=1 ArrayTaskId=3 JobName=elastic
   JobState=REQUEUE_HOLD Reason=JobHoldMaxRequeue Dependency=(null)

JobId=4 ArrayJobId=1 ArrayTaskId=2 JobName=elastic
   JobState=RUNNING Reason=None Dependency=(null)

JobId=3 ArrayJobId=1 ArrayTaskId=1 JobName=elastic
   JobState=PENDING Reason=JobHeldUser Dependency=(null)
"""


@pytest.fixture
def cancelled(tmp_path: Path, program: Callable[[str, str], None]) -> Path:
    """What scancel is told to do; scontrol shows the array."""
    program("scontrol", f"echo '{SHOWN}'")
    program("scancel", f'echo "$@" >>{tmp_path}/cancelled')
    return tmp_path / "cancelled"


def test_those_that_slurm_holds_are_cancelled_and_no_others(cancelled: Path) -> None:
    said = list[str]()
    element = slurm_job(SLURM_JOB_ID="4", SLURM_ARRAY_JOB_ID="1", SLURM_ARRAY_TASK_ID="2")
    at_end(element, Controller(), say=said.append).cancel_held_elements()
    assert cancelled.read_text() == "1_3\n"
    assert len(said) == 1
    assert "job 1_3 is held by Slurm (JobHoldMaxRequeue)" in said[0]


def test_a_job_that_is_no_array_asks_nothing(cancelled: Path) -> None:
    at_end(slurm_job(), Controller(), say=pytest.fail).cancel_held_elements()
    assert not cancelled.exists()
