"""Which agent of a job asks Slurm for all of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slurm_elastic.agent.asker import is_asker
from slurm_elastic.rundir import RunDir
from slurm_elastic.slurm import SlurmJob


def job(node: str) -> SlurmJob:
    environ = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-4]", "SLURMD_NODENAME": node}
    found = SlurmJob.from_environment(environ)
    assert found is not None
    return found


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    made = RunDir.for_run(tmp_path, "7")
    made.open()
    return made


def formed(run_dir: RunDir, number: int, *agents: str) -> None:
    run_dir.claim_round(number, json.dumps({"places": [{"agent": agent} for agent in agents]}).encode())


def test_the_agent_of_the_first_node_asks_before_there_is_a_round(run_dir: RunDir) -> None:
    assert is_asker(run_dir, job("n1"), "n1/7.0/10")
    assert not is_asker(run_dir, job("n2"), "n2/7.0/20")


def test_without_the_first_node_the_first_in_the_newest_round_asks(run_dir: RunDir) -> None:
    formed(run_dir, 0, "n1/7.0/10", "n2/7.0/20", "n3/7.0/30")
    assert not is_asker(run_dir, job("n2"), "n2/7.0/20")
    formed(run_dir, 1, "n2/7.0/20", "n3/7.0/30")
    assert is_asker(run_dir, job("n2"), "n2/7.0/20")
    assert not is_asker(run_dir, job("n3"), "n3/7.0/30")


def test_agents_of_other_jobs_and_incarnations_do_not_count(run_dir: RunDir) -> None:
    formed(run_dir, 0, "n1/6.0/10", "n2/7.1/20", "n3/7.0/30")
    assert is_asker(run_dir, job("n3"), "n3/7.0/30")
    assert not is_asker(run_dir, job("n2"), "n2/7.0/21")
