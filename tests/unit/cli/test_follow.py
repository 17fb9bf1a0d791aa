"""submit --follow: the output of a job until it ends, and its exit code."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from slurm_elastic.cli import main

JOB = "JobId=12 JobName=elastic\n   JobState={} Reason={} Restarts=0 ExitCode={}\n"
FINAL = [("COMPLETED|None|0:0", 0), ("FAILED|None|1:0", 1), ("CANCELLED|None|0:15", 143), ("CANCELLED|None|0:0", 1)]


WORDS = ["submit", "--follow", "train.py"]


@pytest.fixture
def says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: Callable[[str, str], None]) -> Callable[..., None]:
    """Let scontrol tell of a job one of these states after the other, and of the last ever."""
    program("sbatch", "cat >/dev/null\necho one >elastic-12.out\necho 12")
    program("scontrol", f"cd {tmp_path}\nset -- state.*\ncat $1\n[ $# = 1 ] || rm $1")
    monkeypatch.delenv("SLURM_ELASTIC_TEMPLATE", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("slurm_elastic.cli.commands.submit._ASK_SLURM", 0.05)
    monkeypatch.setattr("slurm_elastic.cli.commands.submit._PAUSE", 0.01)
    (tmp_path / "train.py").touch()

    def say(*states: str) -> None:
        for number, state in enumerate(states):
            (tmp_path / f"state.{number}").write_text(JOB.format(*state.split("|")))

    return say


@pytest.mark.parametrize(("last", "code"), FINAL)
def test_it_ends_with_the_job_and_its_exit_code(
    tmp_path: Path, says: Callable[..., None], capfdbinary: pytest.CaptureFixture[bytes], last: str, code: int
) -> None:
    says("PENDING|Resources|0:0", "RUNNING|None|0:0", last)
    assert main(WORDS) == code
    out, err = capfdbinary.readouterr()
    assert out == b"one\n"
    assert err.decode() == f"job 12, output: {tmp_path}/elastic-12.out\njob 12 is pending (Resources)\n"


def test_what_is_in_the_file_already_is_not_of_the_job(
    tmp_path: Path, says: Callable[..., None], capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    says("COMPLETED|None|0:0")
    submit, follow, script = WORDS
    (tmp_path / "[a]*.txt").write_text("before\n")
    sbatch = tmp_path / "bin/sbatch"
    sbatch.write_text(sbatch.read_text().replace("echo one >elastic-12.out", "printf 'half a line' >>'[a]*.txt'"))
    assert main([submit, follow, "--output=[a]*.txt", script]) == 0
    assert capfdbinary.readouterr().out == b"half a line"
    assert main([submit, follow, "--output=%N.txt", script]) == 2
    assert "--follow cannot tell the path of" in capfdbinary.readouterr().err.decode()


def test_ctrl_c_leaves_the_job_running(says: Callable[..., None], capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    says("RUNNING|None|0:0")
    main_thread = threading.main_thread().ident
    assert main_thread is not None

    def interrupt() -> None:
        while b"one" not in capfdbinary.readouterr().out:
            time.sleep(0.01)
        signal.pthread_kill(main_thread, signal.SIGINT)

    threading.Thread(target=interrupt).start()
    assert main(WORDS) == 130
    assert b"job 12 goes on: slurm-elastic status 12, scancel 12\n" in capfdbinary.readouterr().err
