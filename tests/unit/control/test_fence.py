"""The rounds and terms in the run directory by which a worker learns that its group is superseded."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_elastic.control.worker_side import is_superseded
from slurm_elastic.rundir import RunDir

SCOPE = "run.0"


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    directory = RunDir.for_run(tmp_path, "run").open()
    directory.claim_record({}, "rounds", 3)
    directory.claim_record({}, "epochs", SCOPE, 2)
    return directory


def environ(directory: RunDir, **changed: str) -> dict[str, str]:
    own = {"RUN_ID": "run", "RUN_DIR": str(directory.path), "ROUND": "3", "SCOPE": SCOPE, "EPOCH": "2"}
    return {f"SLURM_ELASTIC_{name}": value for name, value in {**own, **changed}.items()}


def test_the_present_group(run_dir: RunDir) -> None:
    assert not is_superseded(environ(run_dir))


def test_newer_round(run_dir: RunDir) -> None:
    run_dir.claim_record({}, "rounds", 4)
    assert is_superseded(environ(run_dir))
    assert is_superseded(environ(run_dir, SCOPE="", EPOCH=""))


def test_newer_term(run_dir: RunDir) -> None:
    run_dir.claim_record({}, "epochs", SCOPE, 3)
    assert is_superseded(environ(run_dir))
    assert not is_superseded(environ(run_dir, SCOPE="run.1"))
    assert not is_superseded(environ(run_dir, EPOCH="none"))
    # The newer name counts where both are given.
    assert not is_superseded(environ(run_dir, TERM="3"))


def test_unknown_records(run_dir: RunDir, tmp_path: Path) -> None:
    assert not is_superseded({})
    assert not is_superseded(environ(run_dir, ROUND=""))
    assert not is_superseded(environ(run_dir, RUN_DIR=str(tmp_path / "not-on-this-node")))


def test_run_directory_that_cannot_be_read(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rounds = run_dir.path / "rounds"
    rounds.rename(run_dir.path / "elsewhere")
    rounds.touch()
    assert is_superseded(environ(run_dir))
    assert "no checkpoint is published" in caplog.text
