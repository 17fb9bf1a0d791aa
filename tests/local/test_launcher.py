"""Elastic runs from a Python program."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from slurm_elastic import ExitCode, LaunchConfig, LaunchError, UsageError, launch
from tests.local.waiting import eventually

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys, time
from pathlib import Path
import slurm_elastic

def wait(path):
    Path(path).touch()
    time.sleep(300)

if __name__ == "__main__":
    config = slurm_elastic.LaunchConfig(start="cold", run_dir=sys.argv[1])
    try:
        slurm_elastic.launch(wait, sys.argv[2], config=config)
    except slurm_elastic.LaunchError as error:
        print(error)
        sys.exit(error.exit_code)
"""


@pytest.fixture(autouse=True)
def _outside_of_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("SLURM", "PET_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def test_results_by_rank_after_a_worker_has_failed_and_one_that_fails_for_good(tmp_path: Path) -> None:
    factor = 3

    def train(offset: int) -> tuple[str, int]:
        if os.environ["SLURM_ELASTIC_ROUND"] == "0":
            raise ValueError("told to fail")
        return os.environ["SLURM_ELASTIC_REASON"], offset + factor * int(os.environ["RANK"])

    config = LaunchConfig(workers_per_node=2, max_restarts=1, run_dir=tmp_path)
    assert launch(train, 10, config=config) == {0: ("worker_failed", 10), 1: ("worker_failed", 13)}
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    with pytest.raises(LaunchError, match="the workers failed for good") as caught:
        launch(train, 10, config=LaunchConfig(start="cold", run_dir=tmp_path))
    assert caught.value.exit_code is ExitCode.FAILED
    # torch's users look for this.
    assert isinstance(caught.value, ChildFailedError)
    rank, failure = caught.value.get_first_failure()
    assert (rank, failure.local_rank, failure.exitcode) == (0, 0, 1)
    assert "told to fail" in failure.message["message"]


def test_a_worker_that_is_killed_is_a_failure_of_torch_without_an_error_file(tmp_path: Path) -> None:
    def train() -> None:
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()

    with pytest.raises(LaunchError) as caught:
        launch(train, config=LaunchConfig(start="cold", workers_per_node=2, run_dir=tmp_path))
    assert {rank: failure.exitcode for rank, failure in caught.value.failures.items()} == {1: -signal.SIGKILL}


def test_mistakes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match="give max_nodes, too"):
        LaunchConfig(min_nodes=2)
    with pytest.raises(UsageError, match="cannot be pickled"):
        launch(print, threading.Lock())
    with pytest.raises(LaunchError, match="wrong configuration") as caught:
        launch(print, config=LaunchConfig(start="cold", run_dir=tmp_path / "nowhere"))
    assert caught.value.exit_code is ExitCode.USAGE
    assert "nowhere is no directory on this node" in capfd.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_signals_reach_the_agent(tmp_path: Path, number: signal.Signals) -> None:
    program, there = tmp_path / "program.py", tmp_path / "there"
    program.write_text(PROGRAM)
    with subprocess.Popen(
        [sys.executable, str(program), str(tmp_path), str(there)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PET_CONSOLE": "full"},
    ) as process:
        eventually(there.exists)
        process.send_signal(number)
        # The agent has both pipes, too, so this waits for its end.
        out, err = process.communicate(timeout=60)
    if number is signal.SIGTERM:
        assert process.returncode == 75
        assert b"this node left the run on notice" in out
    assert b"got SIGTERM" in err


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")
def test_a_directory_that_another_user_has_made_again_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As where a cleaner has emptied TMPDIR while the agent waited: its name is in the command lines of processes."""
    begin = subprocess.Popen

    def cleaned(command: list[str], env: dict[str, str], **options: object) -> subprocess.Popen[bytes]:
        directory = Path(env["SLURM_ELASTIC_LAUNCH_DIR"])
        for path in (directory / "function.pkl", directory):
            os.chown(path, 65534, -1)
        return begin(command, env=env, **options)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr("slurm_elastic.launcher.subprocess.Popen", cleaned)
    touched = tmp_path / "touched"
    with pytest.raises(LaunchError):
        launch(touched.touch, config=LaunchConfig(start="cold", run_dir=tmp_path))
    assert not touched.exists()
    assert "belongs to another user (uid 65534); call launch again" in capfd.readouterr().err
