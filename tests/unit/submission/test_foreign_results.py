"""Results that another user has put where a job's would be: they are not unpickled, as that is code as this user."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from slurm_elastic.submission.job import LocalElasticJob

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")


@pytest.fixture
def job(tmp_path: Path) -> Any:
    made = LocalElasticJob(folder=tmp_path, job_id="7", tasks=(0,))
    made.paths.result_pickle.write_bytes(pickle.dumps(("success", 42)))
    return made


def test_a_result_of_ones_own(job: Any) -> None:
    assert job._value() == 42


@as_root
def test_a_result_of_another_user(job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "_get_outcome_and_result", lambda: pytest.fail("unpickled"))
    os.chown(job.paths.result_pickle, 65534, -1)
    with pytest.raises(PermissionError, match=r"belongs to another user \(uid 65534\)"):
        job._value()


def test_a_link_in_place_of_a_result(job: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "_get_outcome_and_result", lambda: pytest.fail("unpickled"))
    job.paths.result_pickle.rename(tmp_path / "elsewhere")
    job.paths.result_pickle.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        job._value()
