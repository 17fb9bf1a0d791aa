"""The controller: outputs/*.txt were printed by scontrol of 22.05.8, with user and host names replaced.

The programs that the last tests start are shell scripts in place of an scontrol that is slow or fails.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
from pathlib import Path

import pytest

from slurm_elastic.slurm.controller import Controller, JobView, NodeState, parse_jobs, parse_nodes

OUTPUTS = Path(__file__).parent / "outputs"


def job(name: str) -> JobView:
    (view,) = parse_jobs((OUTPUTS / name).read_text())
    return view


def test_a_running_job_and_a_job_name_that_looks_like_fields() -> None:
    # Its JobName is "x Requeue=0 Restarts=9", its comment and arguments hold JobState=FAILED.
    assert job("job_running.txt") == JobView(
        job_id="1",
        array_job_id=None,
        array_task_id=None,
        state="RUNNING",
        reason=None,
        restarts=2,
        requeue=True,
        preempt_time=None,
        end_time=1795179347,
        nodes=("f1", "f2"),
    )


def test_preempted_in_grace() -> None:
    view = job("job_preempted_in_grace.txt")
    assert view.state == "RUNNING"
    assert view.preempt_time == 1795175787
    assert view.end_time == view.preempt_time + 60


def test_requeued_while_completing() -> None:
    view = job("job_requeued_while_completing.txt")
    assert (view.state, view.restarts, view.reason, view.nodes) == ("COMPLETING", 1, None, ("f1",))


def test_time_limit() -> None:
    view = job("job_time_limit.txt")
    assert (view.state, view.restarts, view.reason) == ("COMPLETING", 0, "TimeLimit")


def test_cancelled() -> None:
    view = job("job_cancelled.txt")
    assert (view.state, view.restarts, view.reason, view.preempt_time) == ("COMPLETING", 0, None, None)


def test_pending_after_requeue() -> None:
    view = job("job_pending.txt")
    assert (view.state, view.reason, view.end_time, view.nodes) == ("PENDING", "BeginTime", None, ())


def test_an_array_prints_several_jobs() -> None:
    views = parse_jobs((OUTPUTS / "jobs_array.txt").read_text())
    assert [(view.job_id, view.array_job_id, view.array_task_id, view.state) for view in views] == [
        ("13", "13", "5,7%1", "PENDING"),
        ("14", "13", "3", "RUNNING"),
    ]


def test_a_job_that_may_not_be_requeued() -> None:
    (view,) = parse_jobs("JobId=5 JobName=j\n   JobState=RUNNING Reason=None\n   Requeue=0 Restarts=0\n")
    assert not view.requeue


def test_a_comment_of_several_lines_changes_nothing() -> None:
    text = (OUTPUTS / "job_running.txt").read_text().replace("Reason=Bogus", "\n   JobState=FAILED Restarts=9\n")
    assert parse_jobs(text) == (job("job_running.txt"),)


@pytest.mark.parametrize("text", ["", "\n", "slurm_load_jobs error: Unable to contact slurm controller\n", "No jobs\n"])
def test_anything_else_is_no_job(text: str) -> None:
    assert parse_jobs(text) == ()


def test_nodes() -> None:
    views = parse_nodes((OUTPUTS / "nodes.txt").read_text())
    assert {name: view.state for name, view in views.items()} == {
        "f1": NodeState.UP,
        "f2": NodeState.DRAINED,
        "f9": NodeState.DOWN,
        "f10": NodeState.UNKNOWN,
    }
    assert {view.address for view in views.values()} == {"127.0.0.1"}


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("IDLE", NodeState.UP),
        ("ALLOCATED", NodeState.UP),
        ("MIXED+COMPLETING", NodeState.UP),
        ("IDLE+CLOUD+POWERING_UP", NodeState.UP),
        ("MIXED+MAINTENANCE+RESERVED", NodeState.UP),
        ("ALLOCATED+DRAIN", NodeState.DRAINED),
        ("MIXED+DRAIN+REBOOT_REQUESTED", NodeState.DRAINED),
        ("ALLOCATED+FAIL", NodeState.DOWN),
        ("DOWN", NodeState.DOWN),
        ("DOWN*", NodeState.DOWN),
        ("DOWN+DRAIN+NOT_RESPONDING", NodeState.DOWN),
        ("IDLE+CLOUD+POWERED_DOWN", NodeState.DOWN),
        ("ALLOCATED*", NodeState.UNKNOWN),
        ("ALLOCATED+NOT_RESPONDING", NodeState.UNKNOWN),
        ("MIXED+DRAIN+NOT_RESPONDING", NodeState.UNKNOWN),
        ("UNKNOWN", NodeState.UNKNOWN),
    ],
)
def test_node_states(text: str, state: NodeState) -> None:
    view = parse_nodes(f"NodeName=n1 Arch=x86_64 NodeAddr=10.0.0.1 State={text} ThreadsPerCore=1 Reason=State=IDLE\n")
    assert view["n1"].state is state
    assert view["n1"].address == "10.0.0.1"


def program(directory: Path, name: str, body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = directory / name
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")


def test_without_scontrol_everything_is_unknown_and_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    controller = Controller()
    for _ in range(2):
        assert controller.node_address("n1") is None
        assert controller.node_states(["n1", "n2"]) == {"n1": NodeState.UNKNOWN, "n2": NodeState.UNKNOWN}
        assert controller.job("1") is None
        assert not controller.requeue("1")
        assert not controller.cancel("1")
    assert [record.getMessage() for record in caplog.records] == [
        f"{command} cannot be started: No such file or directory"
        for command in ("scontrol --oneliner show node n1", "scontrol show job 1", "scontrol requeue 1", "scancel 1")
    ]
    assert all(record.levelno == logging.WARNING for record in caplog.records)


def test_a_slow_scontrol_is_killed_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # A child that keeps the pipe open must not hold the answer back either.
    program(tmp_path, "scontrol", f"sleep 1000 & echo $! > {tmp_path}/child; wait", monkeypatch)
    started = tmp_path / "child"
    for timeout in (0.5, 5.0, 50.0):
        assert Controller(timeout).job("1") is None
        # Else this machine took longer to start it.
        if started.exists() and started.read_text():
            break
    assert "no answer within 0.5 s" in caplog.text
    child = int(started.read_text())
    try:
        subprocess.run(["tail", f"--pid={child}", "-f", "/dev/null"], timeout=30, check=True)
    except subprocess.TimeoutExpired:
        os.kill(child, signal.SIGKILL)
        raise


def test_a_failing_scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    program(tmp_path, "scontrol", "echo slurm_load_jobs error: down >&2; exit 1", monkeypatch)
    controller = Controller()
    assert controller.job("1") is None
    assert not controller.requeue("1")
    assert "slurm_load_jobs error: down" in caplog.text


def test_finds_the_job_among_those_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, "scontrol", f"cat {OUTPUTS}/jobs_array.txt", monkeypatch)
    controller = Controller()
    by_job, by_element = controller.job("14"), controller.job("13_3")
    assert by_job is not None
    assert by_job.array_task_id == "3"
    assert by_element == by_job
    assert controller.job("99") is None


def test_nodes_that_slurm_does_not_know_are_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, "scontrol", f"cat {OUTPUTS}/nodes.txt; exit 1", monkeypatch)
    states = Controller().node_states(["f1", "nope"])
    assert states == {"f1": NodeState.UP, "nope": NodeState.UNKNOWN}


@pytest.mark.parametrize(
    ("body", "known"), [("echo n1", True), ("exit 0", False), ("echo error >&2; exit 1", None), ("exit 127", None)]
)
def test_whether_there_is_a_node(
    body: str, known: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path, "sinfo", body, monkeypatch)
    assert Controller().knows_node("n1") is known


def test_asks_its_own_cluster_in_epoch_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, "scontrol", f'echo "$SLURM_TIME_FORMAT,$SLURM_CLUSTERS,$*" > {tmp_path}/asked', monkeypatch)
    monkeypatch.setenv("SLURM_CLUSTERS", "other")
    monkeypatch.setenv("SLURM_TIME_FORMAT", "relative")
    Controller().job("12")
    assert (tmp_path / "asked").read_text() == "%s,,show job 12\n"
