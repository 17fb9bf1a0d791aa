"""submit --follow: the output of a job until it ends, and its exit code."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from slurm_elastic.cli import main

JOB = "JobId=12 JobName=elastic\\n   JobState={} Reason={} Restarts=0 ExitCode={}\\n"
FINAL = [("COMPLETED|None|0:0", 0), ("FAILED|None|1:0", 1), ("CANCELLED|None|0:15", 143), ("CANCELLED|None|0:0", 1)]


def slurm(base: Path, monkeypatch: pytest.MonkeyPatch, *states: str) -> list[str]:
    """Put an sbatch into PATH, and an scontrol that tells of a job one state after the other, and of the last ever."""
    tools = base / "tools"
    tools.mkdir()
    for number, state in enumerate(states):
        (tools / f"state.{number}").write_text(JOB.format(*state.split("|")).replace("\\n", "\n"))
    (tools / "sbatch").write_text("#!/bin/sh\ncat >/dev/null\necho one >elastic-12.out\necho 12\n")
    (tools / "scontrol").write_text(f"#!/bin/sh\ncd {tools}\nset -- state.*\ncat $1\n[ $# = 1 ] || rm $1\n")
    for tool in ("sbatch", "scontrol"):
        (tools / tool).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    monkeypatch.delenv("SLURM_ELASTIC_TEMPLATE", raising=False)
    monkeypatch.chdir(base)
    monkeypatch.setattr("slurm_elastic.cli.commands.submit._ASK_SLURM", 0.05)
    monkeypatch.setattr("slurm_elastic.cli.commands.submit._PAUSE", 0.01)
    (base / "train.py").touch()
    return ["submit", "--follow", "train.py"]


@pytest.mark.parametrize(("last", "code"), FINAL)
def test_it_ends_with_the_job_and_its_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes], last: str, code: int
) -> None:
    words = slurm(tmp_path, monkeypatch, "PENDING|Resources|0:0", "RUNNING|None|0:0", last)
    assert main(words) == code
    out, err = capfdbinary.readouterr()
    assert out == b"one\n"
    assert err.decode() == f"job 12, output: {tmp_path}/elastic-12.out\njob 12 is pending (Resources)\n"


def test_what_is_in_the_file_already_is_not_of_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    submit, follow, script = slurm(tmp_path, monkeypatch, "COMPLETED|None|0:0")
    (tmp_path / "[a]*.txt").write_text("before\n")
    sbatch = tmp_path / "tools/sbatch"
    sbatch.write_text(sbatch.read_text().replace("echo one >elastic-12.out", "printf 'half a line' >>'[a]*.txt'"))
    assert main([submit, follow, "--output=[a]*.txt", script]) == 0
    assert capfdbinary.readouterr().out == b"half a line"
    assert main([submit, follow, "--output=%N.txt", script]) == 2
    assert "--follow cannot tell the path of" in capfdbinary.readouterr().err.decode()


def test_ctrl_c_leaves_the_job_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    words = slurm(tmp_path, monkeypatch, "RUNNING|None|0:0")
    main_thread = threading.main_thread().ident
    assert main_thread is not None

    def interrupt() -> None:
        while b"one" not in capfdbinary.readouterr().out:
            time.sleep(0.01)
        signal.pthread_kill(main_thread, signal.SIGINT)

    threading.Thread(target=interrupt).start()
    assert main(words) == 130
    assert b"job 12 goes on: slurm-elastic status 12, scancel 12\n" in capfdbinary.readouterr().err
