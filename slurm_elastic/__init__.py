"""Elastic PyTorch training on Slurm."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slurm_elastic._lazy import lazy

if TYPE_CHECKING:
    from slurm_elastic._version import __version__
    from slurm_elastic.errors import UsageError
    from slurm_elastic.submission import (
        DebugElasticExecutor,
        ElasticExecutor,
        ElasticJob,
        LocalElasticExecutor,
        WorkerFailedError,
    )
else:
    # submitit is imported only when an executor is asked for.
    __getattr__ = lazy(
        __name__,
        {
            "DebugElasticExecutor": "submission",
            "ElasticExecutor": "submission",
            "ElasticJob": "submission",
            "LocalElasticExecutor": "submission",
            "UsageError": "errors",
            "WorkerFailedError": "submission",
            "__version__": "_version",
        },
    )

__all__ = [
    "DebugElasticExecutor",
    "ElasticExecutor",
    "ElasticJob",
    "LocalElasticExecutor",
    "UsageError",
    "WorkerFailedError",
    "__version__",
]
