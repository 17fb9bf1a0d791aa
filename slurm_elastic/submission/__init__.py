"""Submission of elastic runs: submitit's executors with elastic agents, and ``slurm-elastic submit``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slurm_elastic._lazy import lazy

__all__ = [
    "DebugElasticExecutor",
    "ElasticExecutor",
    "ElasticJob",
    "LocalElasticExecutor",
    "LocalElasticJob",
    "WorkerFailedError",
]

if TYPE_CHECKING:
    from slurm_elastic.submission.executor import DebugElasticExecutor, ElasticExecutor, LocalElasticExecutor
    from slurm_elastic.submission.job import ElasticJob, LocalElasticJob, WorkerFailedError
else:
    # ``slurm-elastic submit`` does not need submitit.
    __getattr__ = lazy(__name__, {name: "executor" if name.endswith("Executor") else "job" for name in __all__})
