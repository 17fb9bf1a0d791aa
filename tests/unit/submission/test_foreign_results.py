"""Results that another user has put where a job's would be: they are not unpickled, as that is code as this user."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest

from slurm_elastic.submission.job import LocalElasticJob

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")


class Code:
    """Makes a directory when it is unpickled."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.directory),)


@pytest.fixture
def made_by_code(tmp_path: Path) -> Path:
    return tmp_path / "unpickled"


@pytest.fixture
def job(tmp_path: Path, made_by_code: Path) -> LocalElasticJob:
    """A job whose run is finished."""
    made = LocalElasticJob(folder=tmp_path, job_id="7", tasks=(0,))
    made.run_dir.open().mark_done({})
    made.paths.result_pickle.write_bytes(pickle.dumps(("success", Code(made_by_code))))
    return made


def test_a_result_of_ones_own(job: LocalElasticJob, made_by_code: Path) -> None:
    assert job.result() is None
    assert made_by_code.exists()


@as_root
def test_a_result_of_another_user(job: LocalElasticJob, made_by_code: Path) -> None:
    os.chown(job.paths.result_pickle, 65534, -1)
    with pytest.raises(PermissionError, match=r"belongs to another user \(uid 65534\)"):
        job.result()
    assert not made_by_code.exists()


def test_a_link_in_place_of_a_result(job: LocalElasticJob, made_by_code: Path, tmp_path: Path) -> None:
    job.paths.result_pickle.rename(tmp_path / "elsewhere")
    job.paths.result_pickle.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        job.result()
    assert not made_by_code.exists()
