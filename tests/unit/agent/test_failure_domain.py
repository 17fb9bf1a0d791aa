"""The failure domain of a node, from Slurm's topology, GPUs and commands of the site."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest

from slurm_elastic.agent.node.failure_domain import failure_domain, nvlink_domain
from slurm_elastic.slurm import SlurmJob

ELEMENT = {
    "SLURM_JOB_ID": "31",
    "SLURM_ARRAY_JOB_ID": "30",
    "SLURM_ARRAY_TASK_ID": "2",
    "SLURM_JOB_NODELIST": "n[1-4]",
    "SLURM_JOB_NUM_NODES": "4",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[1-4]",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_STEP_TASKS_PER_NODE": "1(x4)",
    "SLURMD_NODENAME": "n3",
    "SLURM_NODEID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_TOPOLOGY_ADDR": "s0.s4.n3",
    "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.node",
}
FABRIC = """
    Fabric
        State                             : Completed
        Status                            : Success
        CliqueId                          : {clique}
        ClusterUUID                       : {cluster}
"""


@pytest.fixture
def quiet() -> Iterator[int]:
    """A descriptor on which no signal is told."""
    reader, writer = os.pipe()
    yield reader
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize(
    ("choice", "label"),
    [
        ("auto", "30_2/s0/s4"),
        ("element", "30_2"),
        ("switch", "s0/s4"),
        ("block", "s0/s4"),
        ("none", ""),
        ("echo hello; echo room1/rack-7", "room1/rack-7"),
    ],
)
def test_a_node_has_the_label_of_whom_the_option_names(quiet: int, choice: str, label: str) -> None:
    assert failure_domain(choice, SlurmJob.from_environment(ELEMENT), quiet) == label


def test_outside_of_slurm_only_commands_know_a_label(quiet: int, caplog: pytest.LogCaptureFixture) -> None:
    assert [failure_domain(choice, None, quiet) for choice in ("auto", "element", "echo r1")] == ["", "", "r1"]
    assert not caplog.messages


@pytest.mark.parametrize("choice", ["switch", "block", "nvlink"])
def test_a_label_that_was_asked_for_by_name_is_not_missed_in_silence(
    quiet: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, choice: str
) -> None:
    monkeypatch.setenv("PATH", "")
    environ = {name: value for name, value in ELEMENT.items() if "TOPOLOGY" not in name}
    assert failure_domain(choice, SlurmJob.from_environment(environ), quiet) == ""
    (line,) = caplog.messages
    assert line.startswith(f"--failure-domain {choice}: this node has no label, ")


@pytest.mark.parametrize("command", ["true", "no-such-command", "echo r1; exit 3", "echo two words", "printf %0200d 1"])
def test_a_command_without_a_label_is_named(quiet: int, caplog: pytest.LogCaptureFixture, command: str) -> None:
    assert failure_domain(command, None, quiet) == ""
    (line,) = caplog.messages
    assert line.startswith(f"--failure-domain {command}: this node has no label, its command ")


def test_a_signal_ends_the_wait_for_a_command(caplog: pytest.LogCaptureFixture) -> None:
    reader, writer = os.pipe()
    os.write(writer, b"\0")
    begin = time.monotonic()
    assert failure_domain("sleep 60", None, reader) == ""
    assert time.monotonic() - begin < 9
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize(
    ("fabrics", "label"),
    [
        ([("2", "2ddf8ab5-8f4c-4ba2-a4a5-0ec1e0a6d6f2")] * 4, "2ddf8ab5-8f4c-4ba2-a4a5-0ec1e0a6d6f2.2"),
        ([("1", "2ddf8ab5-8f4c-4ba2-a4a5-0ec1e0a6d6f2"), ("2", "2ddf8ab5-8f4c-4ba2-a4a5-0ec1e0a6d6f2")], ""),
        ([("N/A", "N/A")], ""),
        ([("0", "00000000-0000-0000-0000-000000000000")], ""),
        ([], ""),
    ],
)
def test_nodes_whose_gpus_share_a_clique_are_an_nvlink_domain(fabrics: list[tuple[str, str]], label: str) -> None:
    output = "".join(FABRIC.format(clique=clique, cluster=cluster) for clique, cluster in fabrics)
    assert nvlink_domain(output) == label


def test_a_command_that_hangs_has_its_time_and_no_more(
    quiet: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slurm_elastic.agent.node.failure_domain._TIMEOUT", 0.1)
    begin = time.monotonic()
    assert failure_domain("echo r1; sleep 60", None, quiet) == ""
    assert time.monotonic() - begin < 9
    assert "its command took too long and was killed" in caplog.text
