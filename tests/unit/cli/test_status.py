from __future__ import annotations

import contextlib
import json
import os
import pty
import pwd
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from slurm_elastic.cli import main
from slurm_elastic.cli.commands.status import _nodes, facts
from slurm_elastic.observe.views import AgentView, LiveAgent, LiveRun, RunState, RunStatus
from slurm_elastic.rendezvous.transport.messages import StatusAnswer
from slurm_elastic.rundir import join_named
from tests.conftest import Cli
from tests.unit.observe.runs import WrittenRun

A, B = "n1/7.0/100", "n2/7.0/200"


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nonexistent")
    return tmp_path


@pytest.fixture
def run(base: Path) -> WrittenRun:
    return finished(base, "7")


def finished(base: Path, run_id: str) -> WrittenRun:
    run = WrittenRun(base, run_id)
    run.started(0, A)
    run.started(0, B)
    run.round(1, 0, [A, B])
    run.run_dir.mark_done({"outcome": "succeeded"})
    return run


@contextlib.contextmanager
def leads(run: WrittenRun, says: bytes = b"") -> Iterator[None]:
    """The place of a leader is on record whose port accepts connections, says something, and closes them."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def turn_away() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    with connection:
                        connection.sendall(says)

        thread = threading.Thread(target=turn_away)
        thread.start()
        place = {"agent": A, "address": "127.0.0.1", "port": server.getsockname()[1], "epoch": 1}
        run.run_dir.publish_record(place, "endpoints", "7.0")
        yield
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


def waiting(name: str, reason: str, directory: Path, start: int | None = None) -> str:
    """The line of squeue for a job that waits."""
    job = name.partition("_")[0]
    return "\x1f".join((name, job, "PENDING", "1", job, reason, str(start or "N/A"), str(directory), ""))


@pytest.fixture
def squeue(base: Path, program: Callable[[str, str], None]) -> Callable[..., None]:
    """Put a squeue into PATH that prints these lines, and a scontrol that knows a batch script."""

    def install(*lines: str, script: str = "slurm-elastic agent") -> None:
        program("scontrol", f"[ $1 = write ] && echo '{script}'")
        program("squeue", "\n".join(f"echo '{line}'" for line in lines))

    return install


def test_a_finished_run_is_0(run: WrittenRun, cli: Cli) -> None:
    join_named(run.run_dir, ["train.py", "--name", "a b"], again=False)
    out, err = cli(0, "status 7")
    assert out.startswith("run 7: finished, last change")
    assert "n[1-2]" in out
    assert "  command   train.py --name 'a b'\n" in out
    assert "\x1b" not in out
    assert err == ""


def test_a_damaged_record_only_keeps_the_state_from_being_live(
    base: Path, squeue: Callable[..., None], cli: Cli
) -> None:
    run = WrittenRun(base)
    run.started(0, A)
    squeue(waiting("7", "BeginTime", base, 1764000120))
    with leads(run):
        (run.run_dir.path / "rounds/000000.json").write_text('{"epoch": 1')
        _, err = cli(4, "status 7")
    assert "warning: not live, but from the run directory: " in err


def test_a_run_that_trains_is_3_and_one_that_waits_4(base: Path, squeue: Callable[..., None], cli: Cli) -> None:
    run = WrittenRun(base)
    run.started(0, A)
    with leads(run):
        _, waits = cli(4, "status 7")
        run.round(1, 0, [A, B])
        out, trains = cli(3, "status 7")
    assert "round     0 after start: 2 nodes, 4 workers" in out
    for err in (waits, trains):
        assert "Slurm does not answer" in err
        assert "warning: not live, but from the run directory: the leader at 127.0.0.1:" in err
    # Nothing listens where the leader was.
    assert "Slurm does not answer" in cli(5, "status 7").err
    squeue(waiting("7", "BeginTime", base, 1764000120))
    out, err = cli(4, "status 7")
    assert "7 pending (BeginTime), expected to start at 2025-11-24" in out
    assert "Slurm does not answer" not in err


def test_a_failed_run_is_1(base: Path, cli: Cli) -> None:
    run = WrittenRun(base)
    run.started(0, A)
    run.round(1, 0, [A])
    failure = {"agent": A, "node": "n1", "rank": 1, "exit_code": 1, "message": "ValueError: \x1b[31mno"}
    run.run_dir.publish_record(failure, "failures", "7.0")
    out = cli(1, "status 7").out
    assert "root cause: rank 1 on n1\n  ValueError: ?[31mno\n" in out


def test_nodes_of_a_failure_domain_are_beside_each_other(base: Path, cli: Cli) -> None:
    run = WrittenRun(base)
    names = {"n1": "s2", "n2": "s10", "n3": "s2", "n4": "s10"}
    agents = [f"{node}/7.0/100" for node in names]
    for agent, switch in zip(agents, names.values(), strict=True):
        run.started(0, agent, domain=f"7/s0/{switch}")
    run.round(1, 0, [agents[number] for number in (0, 2, 1, 3)])
    lines = [line.split() for line in cli(3, "status 7").out.splitlines() if line.startswith("  n[")]
    assert [line[:2] + line[4:5] for line in lines] == [["n[1,3]", "7/s0/s2", "0-3"], ["n[2,4]", "7/s0/s10", "4-7"]]
    told = [(each["node"], each["domain"]) for each in json.loads(cli(3, "status 7 --json").out)["agents"]]
    assert told == [("n1", "7/s0/s2"), ("n3", "7/s0/s2"), ("n2", "7/s0/s10"), ("n4", "7/s0/s10")]
    # Where there is one domain nobody has to know it.
    for agent in agents:
        run.started(2, agent, domain="7")
    assert "DOMAIN" not in cli(4, "status 7").out


def test_list(base: Path, cli: Cli) -> None:
    assert cli(0, "list").out == f"no runs in {base}\n"
    finished(base, "7")
    WrittenRun(base, "8")
    head, first, second = cli(0, "list --run-dir", str(base)).out.splitlines()
    assert head.split() == ["STATE", "RUN", "ROUND", "NODES", "WORKERS", "STEP", "CHANGED"]
    assert first.split() == ["stopped", "8"]
    assert second.split()[:3] == ["finished", "7", "0"]


def test_list_of_queued_jobs_finds_their_directories(base: Path, squeue: Callable[..., None], cli: Cli) -> None:
    assert "squeue gives no answer" in cli(2, "list --queued").err
    elsewhere = base / "with blank"
    elsewhere.mkdir()
    run = WrittenRun(elsewhere)
    run.started(0, A)
    squeue(waiting("7", "Resources", elsewhere))
    assert "waiting   7" in cli(0, "list --queued").out
    # status finds it, too, from wherever it is called.
    cli(4, "status 7")


def test_a_first_job_that_waits_is_known(base: Path, squeue: Callable[..., None], cli: Cli) -> None:
    soon, year = int(time.time()) + 3600, int(time.time()) + 365 * 86400
    squeue(
        waiting("3", "Resources", base, soon),
        waiting("4", "Priority", base / "other", year),
        waiting("8_[2-5]", "Resources", base),
    )
    start = time.strftime("%H:%M", time.localtime(soon))
    out = cli(4, "status 3").out
    assert out.startswith("run 3: waiting\n")
    # The date is left out on the day itself, which may end within the hour.
    assert re.search(rf"3 pending \(Resources\), expected to start at (\d+-\d+-\d+ )?{start}", out)
    # A job without a limit is one of a year to Slurm.
    assert "4 pending (Priority)\n" in cli(4, "status 4").out
    cli(4, "status 8")
    out = cli(0, "list").out
    assert [line.split()[:4] for line in out.splitlines()[1:]] == [
        ["waiting", "3", "3", "pending"],
        ["waiting", "8", "8_[2-5]", "pending"],
    ]
    assert [each["run"] for each in json.loads(cli(0, "list --queued --json").out)] == ["3", "4", "8"]
    assert "run 3 has no logs" in cli(2, "logs 3").err
    assert "run 3 is not running" in cli(2, "requeue 3").err


def test_jobs_of_other_programs_are_no_runs(base: Path, squeue: Callable[..., None], cli: Cli) -> None:
    squeue(waiting("3", "Resources", base), script="sleep 5")
    assert cli(0, "list --queued").out == "no runs of queued jobs\n"


@pytest.mark.parametrize("command", ["status", "logs", "report"])
def test_no_such_run(base: Path, cli: Cli, command: str) -> None:
    # The lists of learned imports are there, and what a person has put there.
    (base / "elastic-runs" / ".imports").mkdir(parents=True)
    (base / "elastic-runs" / "old runs").mkdir()
    cli(0, "list")
    assert f"no run 7 in {base}/elastic-runs; change to the directory" in cli(2, command, "7").err
    finished(base, "1234")
    assert "did you mean 1234?" in cli(2, command, "1235").err
    cli(2, command, "../7")


def test_a_run_of_another_user(run: WrittenRun, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    owner = pwd.getpwuid(os.geteuid()).pw_name
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    assert f"run 7 belongs to user {owner}; only that user and root can look at it" in cli(2, "status 7").err
    assert cli(0, "list").out.startswith("no runs in")


def test_problems_are_lines_on_stderr(run: WrittenRun, cli: Cli) -> None:
    run.event(3, "n3", "x", schema=9)
    (run.path / "rounds" / "000000.json").write_text("{")
    lines = cli(0, "status 7").err.splitlines()
    assert [line.startswith("slurm-elastic: warning: ") for line in lines] == [True] * 2


def started(*words: str, stdout: int, **variables: str) -> subprocess.Popen[str]:
    """A command whose output is read by the test."""
    return subprocess.Popen(
        [sys.executable, "-c", f"import sys; from slurm_elastic.cli import main; sys.exit(main({words}))"],
        stdout=stdout,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), **variables},
        text=True,
    )


def test_colours_on_a_terminal_only(run: WrittenRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)

    def shown(**variables: str) -> str:
        ours, theirs = pty.openpty()
        process = started("status", "7", stdout=theirs, **variables)
        os.close(theirs)
        found = b""
        with contextlib.suppress(OSError):
            while data := os.read(ours, 65536):
                found += data
        os.close(ours)
        process.communicate(timeout=60)
        assert process.returncode == 0
        return found.decode()

    assert "\x1b[1;36mfinished\x1b[0m" in shown(TERM="xterm")
    assert "\x1b" not in shown(TERM="dumb")
    assert "\x1b" not in shown(TERM="xterm", NO_COLOR="1")


def test_a_reader_that_ends_early_is_no_traceback(run: WrittenRun) -> None:
    for number in range(3000):
        run.event(number, f"n{number % 9}", "leader_changed", "x" * 200)
    process = started("status", "7", "--json", stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == ""
    assert process.wait(60) == 141


def test_a_run_of_a_thousand_nodes_is_read_within_two_seconds(base: Path, cli: Cli) -> None:
    run = WrittenRun(base)
    agents = [f"n{number}/7.0/1" for number in range(1, 1025)]
    for agent in agents:
        run.started(0, agent)
    run.round(1, 0, agents)
    begun = time.process_time()
    with leads(run):
        lines = cli(3, "status 7").out.splitlines()
    taken = time.process_time() - begun
    assert any(line.split()[:4] == ["n[1-1024]", "training", "0", "0-2047"] for line in lines)
    assert len(lines) < 20
    assert taken < 2.0


def test_memory_for_snapshots_and_the_safe_step() -> None:
    def agent(node: str, size: int, safe: int | None) -> AgentView:
        live = LiveAgent("training", round=0, snapshot_bytes=size, safe_step=safe)
        return AgentView(node, "7", f"{node}/7.0/1", "training", 0.0, 0, live=live)

    live = LiveRun(StatusAnswer("n1/7.0/1", 1, "running", 1.0, 3, 3))
    status = RunStatus("7", "/run", RunState.RUNNING, live=live)
    agents = (agent("n1", 3 << 30, 117), agent("n2", 3 << 29, 118), agent("n3", 3 << 29, None))
    status = replace(status, agents=agents)
    assert ("snapshots", "step 118 is safe on other nodes") in list(facts(status, 1.0))
    (row,) = _nodes(status, 1.0)
    assert (row["SNAPSHOTS"], row["JOB"]) == ("1.5 GiB to 3 GiB", "7")
    # Without snapshots there is no column.
    plain = replace(status, agents=(agent("n1", 0, None),))
    assert set(next(iter(_nodes(plain, 1.0)))) == set(row) - {"SNAPSHOTS"}
    assert not any(name == "snapshots" for name, _ in facts(plain, 1.0))


@pytest.mark.parametrize("command", [["status"], ["drain", "n1"], ["requeue"]])
def test_what_is_no_text_on_the_leaders_port_is_one_line(
    base: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run = WrittenRun(base)
    run.started(0, A)
    run.round(1, 0, [A])
    content = b'{"hello":"\xff"}'
    with leads(run, len(content).to_bytes(4, "big") + content):
        code = main([command[0], "7", *command[1:]])
    told = capsys.readouterr().err
    assert "content that is no JSON" in told
    assert code not in (0, 1)
    assert "Traceback" not in told


def test_a_status_that_cannot_be_read_is_not_that_of_a_failed_run(
    run: WrittenRun, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr("slurm_elastic.cli.commands.status.present_status", fails)
    assert cli(2, "status 7").err.strip().endswith("the state of the run cannot be read: the disk is gone")
