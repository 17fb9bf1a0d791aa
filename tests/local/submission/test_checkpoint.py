"""`checkpoint()` of a callable: what it returns runs in the next round."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slurm_elastic import LocalElasticExecutor
from tests.local.submission.conftest import eventually
from tests.local.waiting import at_once


def _counter(steps: int, enough: Path) -> Any:
    """A callable as submitit's users write them, which reaches the workers by value."""
    import submitit

    class Counter:
        def __init__(self) -> None:
            self.step, self.history = 0, []

        def __call__(self, word: str) -> dict[str, Any]:
            import os
            import time

            self.history.append((int(os.environ["WORLD_SIZE"]), self.step, word))
            told = False
            while self.step < steps and not enough.exists():
                time.sleep(0.05)
                self.step += 1
                if not told:
                    print("counting", flush=True)
                    told = True
            return {"history": self.history, "step": self.step}

        def checkpoint(self, word: str) -> submitit.helpers.DelayedSubmission:
            assert __import__("os").environ["RANK"] == "0"
            return submitit.helpers.DelayedSubmission(self, f"{word}+")

    return Counter()


def _table(job: Any, round_: int) -> dict[str, Any] | None:
    table: dict[str, Any] | None = job.run_dir.read_record("rounds", round_)
    return table


def _wait_until_counting(job: Any, table: dict[str, Any]) -> None:
    logs = f"logs/round_{table['round']:04d}/*/*/stdout.log"
    size = table["world_size"]
    eventually(lambda: [path.read_text() for path in job.run_dir.path.glob(logs)] == ["counting\n"] * size, job)


def _pid(place: dict[str, Any]) -> int:
    return int(place["agent"].rpartition("/")[2])


def test_run_whose_time_is_over_starts_again_with_what_checkpoint_returned(runs: Path, tmp_path: Path) -> None:
    enough = tmp_path / "enough"
    executor = LocalElasticExecutor(runs, min_nodes=2, max_nodes=2)
    executor.update_parameters(timeout_min=10)
    job = executor.submit(_counter(10**6, enough), "first")
    first = eventually(lambda: _table(job, 0), job)
    _wait_until_counting(job, first)
    # As the controller does when the time is nearly over.
    at_once([(SimpleNamespace(pid=_pid(place)), signal.SIGUSR2) for place in first["places"]])
    second = eventually(lambda: _table(job, 1), job)
    assert not {_pid(place) for place in second["places"]} & {_pid(place) for place in first["places"]}
    assert second["reason"] == "requeued"
    enough.touch()
    assert [(size, word) for size, _step, word in job.result()["history"]] == [(2, "first"), (2, "first+")]


@pytest.mark.nightly
def test_run_that_times_out_too_often_ends(runs: Path, tmp_path: Path) -> None:
    executor = LocalElasticExecutor(runs, min_nodes=2, max_nodes=2, max_num_timeout=1)
    executor.update_parameters(timeout_min=10)
    job = executor.submit(_counter(10**6, tmp_path / "never"), "first")
    for round_ in (0, 1):
        table = eventually(lambda number=round_: _table(job, number), job)
        _wait_until_counting(job, table)
        at_once([(SimpleNamespace(pid=_pid(place)), signal.SIGUSR2) for place in table["places"]])
    assert "timed-out too many times; raise max_num_timeout=1" in str(job.exception())
    assert _table(job, 2) is None


@pytest.mark.nightly
def test_next_round_runs_what_checkpoint_returned(runs: Path, tmp_path: Path) -> None:
    enough = tmp_path / "enough"
    executor = LocalElasticExecutor(runs, min_nodes=1, max_nodes=2)
    executor.update_parameters(timeout_min=10)
    job = executor.submit(_counter(10**6, enough), "first")

    def of_two() -> dict[str, Any] | None:
        found = _table(job, job.run_dir.newest("rounds") or 0)
        return found if found is not None and found["world_size"] == 2 else None

    both = eventually(of_two, job)
    _wait_until_counting(job, both)
    (leaving,) = [place for place in both["places"] if place["agent"] != both["leader"]]
    os.kill(_pid(leaving), signal.SIGTERM)
    eventually(lambda: _table(job, both["round"] + 1), job)
    enough.touch()

    history = job.result()["history"]
    assert [size for size, _step, _word in history][-2:] == [2, 1]
    assert [word for _size, _step, word in history] == ["first" + "+" * n for n in range(len(history))]
    steps = [step for _size, step, _word in history]
    assert steps == sorted(steps)
    assert steps[-1] > 0
    assert job.num_tasks == 1
