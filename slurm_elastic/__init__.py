"""Elastic PyTorch training on Slurm."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slurm_elastic._version import __version__

if TYPE_CHECKING:
    from slurm_elastic.errors import UsageError
    from slurm_elastic.submission import (
        DebugElasticExecutor,
        ElasticExecutor,
        ElasticJob,
        LocalElasticExecutor,
        WorkerFailedError,
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


def __getattr__(name: str) -> Any:
    """Import submitit only when an executor is asked for."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from slurm_elastic import errors, submission

    return getattr(errors if name == "UsageError" else submission, name)
