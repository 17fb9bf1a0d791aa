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
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from slurm_elastic.cli import main
from slurm_elastic.cli.commands.status import _facts, _nodes
from slurm_elastic.observe.views import AgentView, LiveAgent, LiveAnswer, RunState, RunStatus
from slurm_elastic.rundir import join_named
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
        run.run_dir.publish_endpoint("7.0", json.dumps(place).encode())
        yield
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


def waiting(name: str, reason: str, directory: Path, start: int | None = None) -> str:
    """The line of squeue for a job that waits."""
    job = name.partition("_")[0]
    return "\x1f".join((name, job, "PENDING", "1", job, reason, str(start or "N/A"), str(directory), ""))


def squeue(base: Path, monkeypatch: pytest.MonkeyPatch, *lines: str, script: str = "slurm-elastic agent") -> None:
    """Put a squeue into PATH that prints these lines, and a scontrol that knows a batch script."""
    tools = base / "tools"
    tools.mkdir()
    (tools / "scontrol").write_text(f"#!/bin/sh\n[ $1 = write ] && echo '{script}'\n")
    (tools / "scontrol").chmod(0o755)
    text = "\n".join(["#!/bin/sh", *(f"echo '{line}'" for line in lines)]) + "\n"
    (tools / "squeue").write_text(text)
    (tools / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}")


def test_a_finished_run_is_0(run: WrittenRun, capsys: pytest.CaptureFixture[str]) -> None:
    join_named(run.run_dir, ["train.py", "--name", "a b"], again=False)
    assert main(["status", "7"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("run 7: finished, last change")
    assert "n[1-2]" in out
    assert "  command   train.py --name 'a b'\n" in out
    assert "\x1b" not in out
    assert err == ""


def test_a_run_that_trains_is_3_and_one_that_waits_4(
    base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = WrittenRun(base)
    run.started(0, A)
    with leads(run):
        assert main(["status", "7"]) == 4
        run.round(1, 0, [A, B])
        assert main(["status", "7"]) == 3
    out, err = capsys.readouterr()
    assert "round     0 after start: 2 nodes, 4 workers" in out
    assert err.count("Slurm does not answer") == 2
    assert err.count("warning: not live, but from the run directory: the leader at 127.0.0.1:") == 2
    # Nothing listens where the leader was.
    assert main(["status", "7"]) == 5
    squeue(base, monkeypatch, waiting("7", "BeginTime", base, 1764000120))
    assert main(["status", "7"]) == 4
    out, err = capsys.readouterr()
    assert "7 pending (BeginTime), expected to start at 2025-11-24" in out
    assert err.count("Slurm does not answer") == 1


def test_a_failed_run_is_1(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = WrittenRun(base)
    run.started(0, A)
    run.round(1, 0, [A])
    failure = {"agent": A, "node": "n1", "rank": 1, "exit_code": 1, "message": "ValueError: \x1b[31mno"}
    run.run_dir.publish_failure("7.0", json.dumps(failure).encode())
    assert main(["status", "7"]) == 1
    out = capsys.readouterr().out
    assert "root cause: rank 1 on n1\n  ValueError: ?[31mno\n" in out


def test_nodes_of_a_failure_domain_are_beside_each_other(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = WrittenRun(base)
    names = {"n1": "s2", "n2": "s10", "n3": "s2", "n4": "s10"}
    agents = [f"{node}/7.0/100" for node in names]
    for agent, switch in zip(agents, names.values(), strict=True):
        run.started(0, agent, domain=f"7/s0/{switch}")
    run.round(1, 0, [agents[number] for number in (0, 2, 1, 3)])
    main(["status", "7"])
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("  n[")]
    assert [line[:2] + line[4:5] for line in lines] == [["n[1,3]", "7/s0/s2", "0-3"], ["n[2,4]", "7/s0/s10", "4-7"]]
    main(["status", "7", "--json"])
    told = [(each["node"], each["domain"]) for each in json.loads(capsys.readouterr().out)["agents"]]
    assert told == [("n1", "7/s0/s2"), ("n3", "7/s0/s2"), ("n2", "7/s0/s10"), ("n4", "7/s0/s10")]
    # Where there is one domain nobody has to know it.
    for agent in agents:
        run.started(2, agent, domain="7")
    main(["status", "7"])
    assert "DOMAIN" not in capsys.readouterr().out


def test_list(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    assert capsys.readouterr().out == f"no runs in {base}\n"
    finished(base, "7")
    WrittenRun(base, "8")
    assert main(["list", "--run-dir", str(base)]) == 0
    head, first, second = capsys.readouterr().out.splitlines()
    assert head.split() == ["STATE", "RUN", "ROUND", "NODES", "WORKERS", "STEP", "CHANGED"]
    assert first.split() == ["stopped", "8"]
    assert second.split()[:3] == ["finished", "7", "0"]


def test_list_of_queued_jobs_finds_their_directories(
    base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["list", "--queued"]) == 2
    assert "squeue gives no answer" in capsys.readouterr().err
    elsewhere = base / "with blank"
    elsewhere.mkdir()
    run = WrittenRun(elsewhere)
    run.started(0, A)
    squeue(base, monkeypatch, waiting("7", "Resources", elsewhere))
    assert main(["list", "--queued"]) == 0
    assert "waiting   7" in capsys.readouterr().out
    # status finds it, too, from wherever it is called.
    assert main(["status", "7"]) == 4


def test_a_first_job_that_waits_is_known(
    base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    soon, year = int(time.time()) + 3600, int(time.time()) + 365 * 86400
    squeue(
        base,
        monkeypatch,
        waiting("3", "Resources", base, soon),
        waiting("4", "Priority", base / "other", year),
        waiting("8_[2-5]", "Resources", base),
    )
    start = time.strftime("%H:%M", time.localtime(soon))
    assert main(["status", "3"]) == 4
    out = capsys.readouterr().out
    assert out.startswith("run 3: waiting\n")
    # The date is left out on the day itself, which may end within the hour.
    assert re.search(rf"3 pending \(Resources\), expected to start at (\d+-\d+-\d+ )?{start}", out)
    # A job without a limit is one of a year to Slurm.
    assert main(["status", "4"]) == 4
    assert "4 pending (Priority)\n" in capsys.readouterr().out
    assert main(["status", "8"]) == 4
    capsys.readouterr()
    assert main(["list"]) == 0
    out = capsys.readouterr().out
    assert [line.split()[:4] for line in out.splitlines()[1:]] == [
        ["waiting", "3", "3", "pending"],
        ["waiting", "8", "8_[2-5]", "pending"],
    ]
    assert main(["list", "--queued", "--json"]) == 0
    assert [each["run"] for each in json.loads(capsys.readouterr().out)] == ["3", "4", "8"]
    assert main(["logs", "3"]) == 2
    assert "run 3 has no logs" in capsys.readouterr().err
    assert main(["requeue", "3"]) == 2
    assert "run 3 is not running" in capsys.readouterr().err


def test_jobs_of_other_programs_are_no_runs(
    base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    squeue(base, monkeypatch, waiting("3", "Resources", base), script="sleep 5")
    assert main(["list", "--queued"]) == 0
    assert capsys.readouterr().out == "no runs of queued jobs\n"


@pytest.mark.parametrize("command", ["status", "logs", "report"])
def test_no_such_run(base: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    # The lists of learned imports are there, and what a person has put there.
    (base / "elastic-runs" / ".imports").mkdir(parents=True)
    (base / "elastic-runs" / "old runs").mkdir()
    assert main(["list"]) == 0
    assert main([command, "7"]) == 2
    assert f"no run 7 in {base}/elastic-runs; change to the directory" in capsys.readouterr().err
    finished(base, "1234")
    assert main([command, "1235"]) == 2
    assert "did you mean 1234?" in capsys.readouterr().err
    assert main([command, "../7"]) == 2


def test_a_run_of_another_user(
    run: WrittenRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    owner = pwd.getpwuid(os.geteuid()).pw_name
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    assert main(["status", "7"]) == 2
    assert f"run 7 belongs to user {owner}; only that user and root can look at it" in capsys.readouterr().err
    assert main(["list"]) == 0
    assert capsys.readouterr().out.startswith("no runs in")


def test_problems_are_lines_on_stderr(run: WrittenRun, capsys: pytest.CaptureFixture[str]) -> None:
    run.event(3, "n3", "x", schema=9)
    (run.path / "rounds" / "000000.json").write_text("{")
    assert main(["status", "7"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert [line.startswith("slurm-elastic: warning: ") for line in lines] == [True] * 3


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


def test_a_run_of_a_thousand_nodes_is_read_within_two_seconds(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = WrittenRun(base)
    agents = [f"n{number}/7.0/1" for number in range(1, 1025)]
    for agent in agents:
        run.started(0, agent)
    run.round(1, 0, agents)
    begun = time.process_time()
    with leads(run):
        assert main(["status", "7"]) == 3
    taken = time.process_time() - begun
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split()[:4] == ["n[1-1024]", "training", "0", "0-2047"] for line in lines)
    assert len(lines) < 20
    assert taken < 2.0


def test_memory_for_snapshots_and_the_safe_step() -> None:
    def agent(node: str, size: int, safe: int | None) -> AgentView:
        live = LiveAgent("training", round=0, snapshot_bytes=size, safe_step=safe)
        return AgentView(node, "7", f"{node}/7.0/1", "training", 0.0, 0, live=live)

    answer = LiveAnswer("n1/7.0/1", "running", 1.0, 1, 3, 3, 3, "", 0.1)
    status = RunStatus("7", "/run", RunState.RUNNING, live=answer)
    agents = (agent("n1", 3 << 30, 117), agent("n2", 3 << 29, 118), agent("n3", 3 << 29, None))
    status = replace(status, agents=agents)
    assert ("snapshots", "step 118 is safe on other nodes") in list(_facts(status, 1.0))
    (row,) = _nodes(status, 1.0)
    assert (row["SNAPSHOTS"], row["JOB"]) == ("1.5 GiB to 3 GiB", "7")
    # Without snapshots there is no column.
    plain = replace(status, agents=(agent("n1", 0, None),))
    assert set(next(iter(_nodes(plain, 1.0)))) == set(row) - {"SNAPSHOTS"}
    assert not any(name == "snapshots" for name, _ in _facts(plain, 1.0))


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
    run: WrittenRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr("slurm_elastic.cli.commands.status.present_status", fails)
    assert main(["status", "7"]) == 2
    assert capsys.readouterr().err.strip().endswith("the state of the run cannot be read: the disk is gone")
