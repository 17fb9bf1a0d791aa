from __future__ import annotations

import pytest

from slurm_elastic.cli.local_agent import share_devices
from slurm_elastic.rundir import RunDir
from slurm_elastic.submission.job_states import RunStatus, latest_log, read_status

FAILURE = {"agent": "n2/7.0/11", "node": "n2", "rank": 1, "exit_code": 1, "message": "ValueError: x"}


def _round(run_dir: RunDir, number: int, *agents: str) -> None:
    places = [{"agent": agent, "node": agent.partition("/")[0]} for agent in agents]
    run_dir.claim_record({"world_size": 2 * len(agents), "places": places}, "rounds", number)


def test_newest_round_and_end(run_dir: RunDir) -> None:
    _round(run_dir, 0, "n1/7.0/10", "n2/7.0/11")
    assert read_status(run_dir) == RunStatus(world_size=4)
    _round(run_dir, 1, "n1/7.0/10")
    run_dir.mark_done({})
    assert read_status(run_dir) == RunStatus(done=True, world_size=2)


def test_failure_counts_until_the_run_is_started_again(run_dir: RunDir) -> None:
    _round(run_dir, 0, "n1/7.0/10", "n2/7.0/11")
    run_dir.publish_record(FAILURE, "failures", "7.0")
    failure = read_status(run_dir).failure
    assert failure is not None
    assert (failure.rank, failure.node, failure.message) == (1, "n2", "ValueError: x")
    # The same job, requeued by hand: the old record is still there.
    _round(run_dir, 1, "n1/7.1/12", "n2/7.1/13")
    assert read_status(run_dir).failure is None


def test_record_that_is_none_says_nothing(run_dir: RunDir) -> None:
    _round(run_dir, 0, "n2/7.0/11")
    run_dir.publish_record({"agent": 3}, "failures", "7.0")
    assert read_status(run_dir) == RunStatus(world_size=2)


def test_log_of_the_last_round_that_has_one(run_dir: RunDir) -> None:
    for number, node, world_size in ((9, "n1", 4), (10, "n3", 200)):
        directory = run_dir.rank_dir(number, node, 1, world_size)
        directory.mkdir(parents=True)
        (directory / "stdout.log").write_text(node)
    found = latest_log(run_dir, 1, "stdout")
    assert found is not None
    assert found.read_text() == "n3"
    assert latest_log(run_dir, 10, "stdout") is None


@pytest.mark.parametrize(
    ("devices", "agents", "index", "share"),
    [("0,1,2,3", 2, 1, "2,3"), ("0,1,2", 2, 0, "0"), ("0", 2, 1, "0"), ("", 2, 0, "")],
)
def test_agents_of_one_machine_share_its_devices(devices: str, agents: int, index: int, share: str) -> None:
    environ = {"SUBMITIT_LOCAL_NTASKS": str(agents), "SUBMITIT_LOCAL_GLOBALID": str(index)}
    environ["CUDA_VISIBLE_DEVICES"] = devices
    share_devices(environ)
    assert environ["CUDA_VISIBLE_DEVICES"] == share
