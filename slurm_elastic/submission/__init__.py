"""Submission: submitit's executors with elastic agents, and ``slurm-elastic submit``."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slurm_elastic.submission.executor import ElasticExecutor
    from slurm_elastic.submission.job import ElasticJob, LocalElasticJob, WorkerFailedError
    from slurm_elastic.submission.local import DebugElasticExecutor, LocalElasticExecutor

__all__ = [
    "DebugElasticExecutor",
    "ElasticExecutor",
    "ElasticJob",
    "LocalElasticExecutor",
    "LocalElasticJob",
    "WorkerFailedError",
]

_MODULES = {
    "DebugElasticExecutor": "local",
    "LocalElasticExecutor": "local",
    "ElasticExecutor": "executor",
    "ElasticJob": "job",
    "LocalElasticJob": "job",
    "WorkerFailedError": "job",
}


def __getattr__(name: str) -> Any:
    """Import what is asked for: a command line that submits needs nothing of submitit."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
