from __future__ import annotations

import datetime
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from slurm_elastic import __version__
from slurm_elastic.cli import main
from slurm_elastic.cli.commands.job_end import code_when_over
from slurm_elastic.rundir import JobRecords, RunDir, join_own
from tests.conftest import Cli
from tests.unit.agent.helpers.jobs import slurm_job

BATCH = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NODEID": "0", "SLURMD_NODENAME": "n1"}
TIME = "2026-11-25T12:00"


@pytest.fixture(autouse=True)
def _batch_script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, clean_environment: None) -> None:
    for name, value in {**BATCH, "SLURM_SUBMIT_DIR": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)


def fail(run_dir: RunDir, scope: str = "7.0", **fields: object) -> None:
    failure = {"agent": "n2/7.0/9", "node": "n2", "rank": 3, "exit_code": 1, **fields}
    run_dir.publish_record(failure, "failures", scope)


@pytest.mark.parametrize("status", [1, 75, 76, 137])
@pytest.mark.parametrize("name", ["job-end", "verdict"])
def test_a_run_that_is_not_finished_leaves_the_exit_code(tmp_path: Path, name: str, status: int) -> None:
    assert main([name, str(status), "train.py"]) == status
    RunDir.for_run(tmp_path, "7").open()
    assert main(["job-end", str(status), "train.py"]) == status


@pytest.mark.parametrize(
    ("base", "run_id", "arguments"),
    [
        (".", "7", "train.py --lr 1"),
        (".", "7", ""),
        (".", "mine", "--run-id mine train.py"),
        ("data", "7", "--nnodes 2 --run-dir {base} train.py"),
    ],
)
def test_a_finished_run_is_a_success_whatever_srun_says(
    tmp_path: Path, cli: Cli, base: str, run_id: str, arguments: str
) -> None:
    directory = tmp_path / base
    directory.mkdir(exist_ok=True)
    RunDir.for_run(directory, run_id).open().mark_done({})
    assert cli(0, "job-end 75", *arguments.format(base=directory).split()).err == (
        f"slurm-elastic job-end: run {run_id} is finished; what srun says above is of agents that were lost or left\n"
    )


@pytest.fixture
def calls(tmp_path: Path, program: Callable[[str, str], None]) -> Path:
    """What scontrol is asked; it shows a job that runs."""
    running = (Path(__file__).parents[1] / "slurm/outputs/job_running.txt").read_text()
    (tmp_path / "job.txt").write_text(re.sub(r"Restarts=\d+", "Restarts=0", re.sub(r"^JobId=\d+", "JobId=7", running)))
    program("scontrol", f'cd {tmp_path}\necho "$*" >>calls\ncat job.txt')
    (tmp_path / "calls").touch()
    return tmp_path / "calls"


def begin(base: Path, step: int) -> RunDir:
    return join_own(base, slurm_job("n[1-2]", SLURM_STEP_ID=str(step)), ("t.py", str(step)))


def test_a_job_of_several_runs_has_succeeded_when_all_have(tmp_path: Path, calls: Path) -> None:
    first, second = begin(tmp_path, 0), begin(tmp_path, 1)
    first.mark_done({})
    assert main(["job-end", "0"]) == 1, "one of them has not finished, as with `wait` of bash"
    assert main(["job-end", "137"]) == 137
    second.mark_done({})
    assert main(["job-end", "137"]) == 0
    # An agent was refused.
    assert main(["job-end", "2"]) == 2
    assert "requeue" not in calls.read_text()


@pytest.mark.parametrize("status", [0, 1, 75])
def test_a_job_is_requeued_if_one_of_its_runs_has_to_go_on(tmp_path: Path, calls: Path, status: int) -> None:
    finished, failed, left = (begin(tmp_path, step) for step in range(3))
    finished.mark_done({})
    fail(failed, "7.1.0")
    JobRecords(left, "7").publish_notice(0, {"signals": ["SIGUSR2"], "cause": "TIME_LIMIT"})
    assert main(["job-end", str(status)]) == 75
    assert calls.read_text().count("requeue") == 1


def test_trouble_leaves_the_exit_code(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli(75, "job-end 75 --run-id a/b").err.startswith("slurm-elastic job-end: run id 'a/b' is no safe file name")
    monkeypatch.delenv("SLURM_JOB_ID")
    assert cli(75, "job-end 75").err.startswith(
        "slurm-elastic job-end: SLURM_JOB_NODELIST is set but SLURM_JOB_ID is not"
    )


def test_the_root_cause_is_said_where_an_agent_of_another_job_led_and_pointed_to_elsewhere(
    run_dir: RunDir, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def said() -> str:
        return cli(1, "job-end 1 train.py").err

    fail(run_dir, exit_code=-11, message="last words")
    assert said() == "root cause: rank 3 on n2 was killed by SIGSEGV\n  last words\n"
    for leader, second in (("n3", 1), ("n2", 2)):
        event = {"time": f"{TIME}:{second:02}+00:00", "event": "run_ended", "node": leader}
        run_dir.append_event(leader, json.dumps(event))
    assert said() == (
        "slurm-elastic job-end: run 7 has failed, its root cause is above; more: slurm-elastic logs 7 --errors\n"
    )
    # It is that of an earlier incarnation.
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert said() == ""


def test_targets_of_agents_that_were_killed_are_withdrawn(run_dir: RunDir) -> None:
    for node, job in (("n1", "7"), ("n2", "7"), ("n1.7", "8"), ("n1", "17")):
        run_dir.publish_health(node, job, b"[]")
    assert main(["job-end", "1", "train.py"]) == 1
    assert sorted(path.name for path in (run_dir.path / "health").iterdir()) == ["n1.17.json", "n1.7.8.json"]


@pytest.mark.parametrize(("status", "said"), [(255, True), (127, True), (1, False), (2, False)])
def test_an_image_without_the_package_is_one_line(
    tmp_path: Path,
    cli: Cli,
    monkeypatch: pytest.MonkeyPatch,
    status: int,
    said: bool,
) -> None:
    monkeypatch.setenv("SLURM_ELASTIC_BATCH_VERSION", f"slurm-elastic {__version__}")
    line = (
        f"slurm-elastic job-end: no agent has started, srun ended with {status}; "
        f"install slurm_elastic {__version__} in the image of the agents\n"
    )
    assert (line in cli(status, f"job-end {status} train.py").err) == said
    # Agents have run.
    RunDir.for_run(tmp_path, "7").open()
    assert line not in cli(status, f"job-end {status} train.py").err


def test_loops_are_said_and_change_nothing(tmp_path: Path, cli: Cli) -> None:
    run_dir = RunDir.for_run(tmp_path, "9").open()
    now = datetime.datetime.now(datetime.timezone.utc).isoformat()
    for event in 4 * [{"event": "leader_changed", "nodes": ["n\x1b[2J"]}]:
        run_dir.append_event("n1", json.dumps({"time": now, **event}))
    arguments = f"--run-dir={tmp_path} --run-id=9 train.py"
    assert cli(1, "job-end 1", *arguments.split()).err == (
        "slurm-elastic job-end: the leader has changed 4 times in an hour; lost on n?[2J; choose a node that is not "
        "overloaded by --leader-node, or let slurm-elastic coordinator lead elsewhere\n"
    )


# The end of a job whose srun does not end.


def write(run_dir: RunDir, agent: str, event: str, at: int, **fields: object) -> None:
    time = f"{TIME}:{at:02}.000+00:00"
    node, job = agent.split("/")[0], agent.split("/")[1].partition(".")[0]
    record = {"time": time, "event": event, "node": node, "schema": 1, "agent": agent, **fields}
    run_dir.append_progress(node, job, json.dumps(record))


@pytest.mark.parametrize("loss", ["node_lost", "leader_changed"])
def test_a_run_is_over_for_its_job_when_no_agent_of_it_runs(run_dir: RunDir, loss: str) -> None:
    first, second, lost = "n1/7.0/9", "n2/7.0/9", "n3/7.0/9"
    # A job that Slurm starts again finds its run done before any agent of it has started.
    run_dir.mark_done({})
    assert code_when_over(["train.py"]) is None
    for agent in (first, second, lost, "n4/8.0/9"):
        write(run_dir, agent, "agent_started", 1)
    for agent in (first, second):
        write(run_dir, agent, "agent_ended", 2, exit_code=0)
    assert code_when_over(["train.py"]) is None
    text = {"time": f"{TIME}:03.000+00:00", "event": loss, "node": "n1", "nodes": ["n3"]}
    run_dir.append_event("n1", json.dumps(text))
    assert code_when_over(["train.py"]) == 0


def test_a_run_that_has_failed_is_over_too(run_dir: RunDir) -> None:
    write(run_dir, "n1/7.0/9", "agent_started", 1)
    write(run_dir, "n1/7.0/9", "agent_ended", 2, exit_code=1)
    # Not over: the job may be requeued.
    assert code_when_over(["train.py"]) is None
    fail(run_dir)
    assert code_when_over(["train.py"]) == 1


def test_srun_has_time_to_tell_the_end_first(run_dir: RunDir) -> None:
    begun = time.monotonic()
    command = [sys.executable, "-m", "slurm_elastic", "job-end", "wait", "train.py"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        run_dir.mark_done({})
        write(run_dir, "n1/7.0/9", "agent_started", 1)
        write(run_dir, "n1/7.0/9", "agent_ended", 2, exit_code=0)
        out, complaint = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "0\n")
    assert "srun does not know that" in complaint
    assert time.monotonic() - begun > 4.0
