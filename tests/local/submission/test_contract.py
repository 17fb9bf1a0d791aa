"""What submitit's own tests ask of its executors and jobs (submitit/core/test_core.py, local/test_local.py, 1.5.4)."""

from __future__ import annotations

import contextlib
import operator
import pickle
import time
from pathlib import Path

import pytest
import submitit

from slurm_elastic import DebugElasticExecutor, LocalElasticExecutor
from tests.local.waiting import HANG, eventually


def test_jobs_of_an_array_and_their_results(runs: Path) -> None:
    jobs = DebugElasticExecutor(runs).map_array(operator.truediv, [1, 1], [2, 4])
    assert len({job.job_id for job in jobs}) == 2
    assert {job.result() for job in submitit.helpers.as_completed(jobs)} == {0.5, 0.25}
    for job, value in zip(jobs, (0.5, 0.25), strict=True):
        job.wait()
        assert job.done()
        assert job.exception() is None
        assert job.results() == [value]
        # A job is known by its folder and id, in another process as well.
        again = pickle.loads(pickle.dumps(job))
        assert (again.job_id, again.paths.folder) == (job.job_id, job.paths.folder)
        assert again.result() == value


def test_a_failure_is_the_exception_of_its_job(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Where a job of submitit's DebugExecutor fails, it stops in the debugger.
    monkeypatch.setattr("pdb.post_mortem", lambda: None)
    job = DebugElasticExecutor(runs).submit(operator.truediv, 1, 0)
    error = job.exception()
    assert "ZeroDivisionError" in f"{type(error).__name__}: {error}"
    with pytest.raises(type(error)):
        job.result()


def test_a_cancelled_job_has_no_result(runs: Path) -> None:
    job = LocalElasticExecutor(runs).submit(time.sleep, 600)
    job.cancel()
    with pytest.raises(submitit.core.utils.UncompletedJobError):
        job.result()
    assert job.done()
    job._process.wait(HANG)
    agents = f"--run-dir={runs}".encode()
    eventually(lambda: not any(agents in line for line in command_lines()), lambda: "an agent is left")


def command_lines() -> list[bytes]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        # A process may end while it is read.
        with contextlib.suppress(OSError):
            found.append(path.read_bytes())
    return found
