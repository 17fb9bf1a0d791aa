"""What `checkpoint()` returns takes the place of the submission, but for a group that another one has followed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import cloudpickle
import pytest

from slurm_elastic.rundir import RunDir
from slurm_elastic.submission.payload import Checkpointing


class Following:
    """What runs next, as far as it is asked here."""

    def set_timeout(self, minutes: int, countdown: int) -> None:
        self.timeout = (minutes, countdown)


@pytest.fixture
def submitted(tmp_path: Path) -> Path:
    path = tmp_path / "submitted.pkl"
    path.write_bytes(b"before")
    return path


def save(submitted: Path, *, rank: int = 0, following: Following | None) -> None:
    submission = SimpleNamespace(_checkpoint_function=lambda: following, _timeout_min=5, _timeout_countdown=2)
    paths = SimpleNamespace(task_id=rank, submitted_pickle=submitted)
    Checkpointing(cast(Any, submission), cast(Any, paths)).save()


def test_it_takes_the_place_of_the_submission(submitted: Path) -> None:
    save(submitted, following=Following())
    assert cloudpickle.loads(submitted.read_bytes()).timeout == (5, 2)


def test_rank_0_saves_if_there_is_anything(submitted: Path) -> None:
    save(submitted, following=None)
    save(submitted, rank=1, following=Following())
    assert submitted.read_bytes() == b"before"


def test_a_group_that_was_followed_saves_nothing(
    submitted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = RunDir.for_run(tmp_path, "run").open()
    monkeypatch.setenv("SLURM_ELASTIC_RUN_DIR", str(run_dir.path))
    monkeypatch.setenv("SLURM_ELASTIC_ROUND", "0")
    run_dir.claim_record({}, "rounds", 1)
    with pytest.raises(RuntimeError, match="another group of workers has taken over"):
        save(submitted, following=Following())
    assert submitted.read_bytes() == b"before"
