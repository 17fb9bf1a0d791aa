"""The check of a node before its agent joins, and commands of the site."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from slurm_elastic.agent.forkserver.linux import process_state
from slurm_elastic.agent.node.node_check import NodeCheck, memory_problems, tell_site
from slurm_elastic.agent.node.site_command import run_site_command
from slurm_elastic.agent.signals import Notices
from tests.local.waiting import eventually


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("echo fine", ""),
        ("echo no fan >&2; exit 3", "ended with exit code 3: no fan"),
        ("exit 3", "ended with exit code 3"),
        ("kill -9 $$", "ended with exit code -9"),
        ("printf 'a\\033[31mb'; exit 1", "ended with exit code 1: a?[31mb"),
    ],
)
def test_the_end_of_a_command(command: str, problem: str) -> None:
    assert run_site_command(command, 60).problem == problem


def test_a_command_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    before = time.monotonic()
    result = run_site_command(f"echo waits; sleep 600 & echo $! > {tmp_path}/pid; wait", 0.5)
    assert result.problem == "took too long and was killed: waits"
    assert time.monotonic() - before < 60
    child = int((tmp_path / "pid").read_text())

    def has_ended() -> bool:
        state = process_state(child)
        # An orphan, which its new parent may not have reaped yet.
        return state is None or state.state == "Z"

    # SIGKILL was sent; a process ends when it gets a processor next.
    eventually(has_ended)


def test_a_command_that_leaves_a_process_is_not_waited_for() -> None:
    """The process holds its output open."""
    assert run_site_command("sleep 600 & echo done", 60).last_line == "done"


def test_a_command_that_prints_a_gigabyte() -> None:
    peak = Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]
    result = run_site_command("head -c 1073741824 /dev/zero; echo; echo done; exit 1", 60)
    grown = int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) - int(peak)
    assert result.problem == "ended with exit code 1: done"
    assert grown < 32 << 10, "KiB"


def test_a_command_that_prints_for_ever_is_killed() -> None:
    result = run_site_command("yes", 0.2)
    assert (result.exit_code, result.last_line) == (None, "y")
    assert len(result.output) <= 4096


@pytest.mark.parametrize(
    ("meminfo", "problems"),
    [
        ("MemTotal:  1 kB\n", []),
        ("MemFree:  1 kB\nMemAvailable:   131072 kB\n", []),
        ("MemAvailable:    65536 kB\n", ["64 MiB of memory are left"]),
    ],
)
def test_a_node_without_memory(meminfo: str, problems: list[str]) -> None:
    assert memory_problems(meminfo) == problems


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("", ""),
        ("true", ""),
        ("exit 4", "--node-check ended with exit code 4"),
        ("/no/such/check 2>&1", "--node-check ended with exit code 127: /bin/sh: 1: /no/such/check: not found"),
    ],
)
def test_the_check_of_the_site(command: str, problem: str) -> None:
    assert NodeCheck(command, 60).problem(Notices()) == problem


def test_a_check_that_hangs() -> None:
    assert NodeCheck("echo looks; sleep 600", 0.3).problem(Notices()) == (
        "--node-check took too long and was killed: looks"
    )


def test_a_directory_that_takes_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: "/proc")
    assert NodeCheck("", 60).problem(Notices()).startswith("no file can be written to /proc: ")
    assert NodeCheck("", 60).problem(Notices()).endswith(", or give --node-check=off")
    assert NodeCheck("off", 60).problem(Notices()) == ""


def test_a_signal_that_asks_to_leave_ends_the_wait_and_no_other_does() -> None:
    left, stayed = Notices(), Notices()
    left.note(signal.SIGTERM)
    assert NodeCheck("sleep 1; exit 1", 60).problem(left) == ""
    stayed.note(signal.SIGCONT)
    assert NodeCheck("sleep 0.3; exit 1", 60).problem(stayed) == "--node-check ended with exit code 1"


def test_the_site_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    words = '"$SLURM_ELASTIC_NODE $SLURM_ELASTIC_RUN_ID $SLURM_ELASTIC_BAD_NODE_REASON"'
    tell_site(f"echo {words} > {tmp_path}/told", "n1", "7", "no fan")
    assert (tmp_path / "told").read_text() == "n1 7 no fan\n"
    tell_site("", "n1", "7", "no fan")
    assert not caplog.records
    tell_site("echo not allowed; exit 1", "n1", "7", "no fan")
    assert [each.message for each in caplog.records] == ["--on-bad-node ended with exit code 1: not allowed"]
