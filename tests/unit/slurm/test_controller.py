"""The controller: the programs that are asked are shell scripts in place of Slurm's that are slow or fail.

They print outputs/*.txt, see test_scontrol_output.py.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from slurm_elastic.slurm import Controller, NodeState
from slurm_elastic.slurm.output import parse_jobs
from tests.local.waiting import eventually, process_state

OUTPUTS = Path(__file__).parent / "outputs"


Install = Callable[[str, str], None]


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
    tmp_path: Path, program: Install, caplog: pytest.LogCaptureFixture
) -> None:
    # A child that keeps the pipe open must not hold the answer back either.
    program("scontrol", f"sleep 1000 & echo $! > {tmp_path}/child; wait")
    started = tmp_path / "child"
    for timeout in (0.5, 5.0, 50.0):
        assert Controller(timeout).job("1") is None
        # Else this machine took longer to start it.
        if started.exists() and started.read_text():
            break
    assert "no answer within 0.5 s" in caplog.text
    child = int(started.read_text())
    # The first process of a machine may take its time to reap a process that has lost its parent.
    eventually(lambda: (process_state(child) or "Z")[0] == "Z")


def test_a_failing_scontrol(program: Install, caplog: pytest.LogCaptureFixture) -> None:
    program("scontrol", "printf 'no DNS record\\nslurm_load_jobs error: down\\n' >&2; exit 1")
    controller = Controller()
    assert controller.job("1") is None
    assert not controller.requeue("1")
    # One line for each command, the last of what it says.
    assert caplog.messages == [
        f"scontrol {words} failed: slurm_load_jobs error: down" for words in ("show job 1", "requeue 1")
    ]


def test_finds_the_job_among_those_printed(program: Install) -> None:
    program("scontrol", f"cat {OUTPUTS}/jobs_array.txt")
    controller = Controller()
    by_job, by_element = controller.job("14"), controller.job("13_3")
    assert by_job is not None
    assert by_job.array_task_id == "3"
    assert by_element == by_job
    assert controller.job("99") is None


def test_a_heterogeneous_job_has_the_nodes_of_all_its_components(program: Install) -> None:
    # An agent on a node of the second component would be taken for one that Slurm has ended.
    program("scontrol", f"cat {OUTPUTS}/jobs_het.txt")
    job = Controller().job("7")
    assert job is not None
    assert (job.job_id, job.het_job_id, job.nodes) == ("7", "7", ("f1", "f2"))


def test_nodes_that_slurm_does_not_know_are_unknown(program: Install) -> None:
    program("scontrol", f"cat {OUTPUTS}/nodes.txt; exit 1")
    states = Controller().node_states(["f1", "nope"])
    assert states == {"f1": NodeState.UP, "nope": NodeState.UNKNOWN}


@pytest.mark.parametrize(
    ("body", "known"), [("echo n1", True), ("exit 0", False), ("echo error >&2; exit 1", None), ("exit 127", None)]
)
def test_whether_there_is_a_node(body: str, known: bool | None, program: Install) -> None:
    program("sinfo", body)
    assert Controller().knows_node("n1") is known


@pytest.mark.parametrize(
    ("preempt_type", "asked"),
    [
        ("preempt/partition_prio", "scontrol --oneliner show partition low"),
        ("preempt/qos", "sacctmgr --noheader --parsable2 show qos format=Name,GraceTime,PreemptMode"),
    ],
)
def test_the_grace_is_that_of_what_preempts(preempt_type: str, asked: str, tmp_path: Path, program: Install) -> None:
    program("scontrol", f'echo "scontrol $*" >{tmp_path}/asked; cat {OUTPUTS}/partitions_22.05.txt')
    program(
        "sacctmgr",
        f'echo "sacctmgr $*" >{tmp_path}/asked; echo "low|00:00:20|requeue"; echo "scavenger|00:00:15|requeue"',
    )
    (view,) = parse_jobs((OUTPUTS / "job_preempted_without_limit_26.05.txt").read_text())
    assert Controller().grace(dataclasses.replace(view, qos="scavenger"), preempt_type) == 15
    assert (tmp_path / "asked").read_text() == f"{asked}\n"
    assert Controller().grace(dataclasses.replace(view, qos=None, partition=None), preempt_type) is None


@pytest.mark.parametrize(("release", "said"), [("21.08.8-2", 1), ("20.11.9", 1), ("22.05.0", 0), ("26.05.5", 0)])
def test_an_older_slurm_is_named_once(
    release: str, said: int, program: Install, caplog: pytest.LogCaptureFixture
) -> None:
    program("scontrol", f"echo Configuration data as of 9; echo 'SLURM_VERSION           = {release}'")
    controller = Controller()
    for _ in range(2):
        assert controller.config() is not None
    warnings = [record.getMessage() for record in caplog.records]
    assert [f"Slurm {release[:5]} is older than 22.05" in line for line in warnings] == [True] * said


def test_asks_its_own_cluster_in_epoch_seconds(
    tmp_path: Path, program: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    program("scontrol", f'echo "$SLURM_TIME_FORMAT,$SLURM_CLUSTERS,$*" > {tmp_path}/asked')
    monkeypatch.setenv("SLURM_CLUSTERS", "other")
    monkeypatch.setenv("SLURM_TIME_FORMAT", "relative")
    Controller().job("12")
    assert (tmp_path / "asked").read_text() == "%s,,show job 12\n"
