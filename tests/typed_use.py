"""What type checkers know of the public names: `make lint` checks it, nothing runs it."""

from __future__ import annotations

from typing_extensions import assert_type

from slurm_elastic import ElasticExecutor, ElasticJob, ElasticState, LocalElasticExecutor
from slurm_elastic.submission import LocalElasticJob


def train(rate: float) -> int:
    """What is submitted."""
    return round(rate)


class Training(ElasticState):
    """A state with a value."""

    best: float


def submit(executor: ElasticExecutor, local: LocalElasticExecutor) -> None:
    """Jobs have the methods of runs, and their results the type of the function."""
    job = executor.submit(train, 0.1)
    assert_type(job, ElasticJob[int])
    assert_type(job.resize(2), str | None)
    assert_type(job.results(), list[int])
    assert_type(executor.submit_script("train.py"), ElasticJob[None])
    assert_type(local.submit(train, 0.1), LocalElasticJob[int])


def go_on(state: Training, loader: list[bytes]) -> None:
    """Nothing of a state is Any."""
    assert_type(next(state.epochs(3)), int)
    assert_type(next(state.batches(loader)), bytes)
    assert_type(state.best, float)
