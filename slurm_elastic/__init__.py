"""Elastic PyTorch training on Slurm."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slurm_elastic._version import __version__

if TYPE_CHECKING:
    from slurm_elastic.errors import UsageError
    from slurm_elastic.submission import ElasticExecutor, ElasticJob, WorkerFailedError

__all__ = ["ElasticExecutor", "ElasticJob", "UsageError", "WorkerFailedError", "__version__"]


def __getattr__(name: str) -> Any:
    """Import submitit only when an executor is asked for."""
    if name == "UsageError":
        from slurm_elastic.errors import UsageError

        return UsageError
    if name in __all__:
        from slurm_elastic import submission

        return getattr(submission, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
