"""Elastic PyTorch training on Slurm.

- `ElasticState`, `ElasticSampler`: state, loop and samples of a training script.
- `trainer`: the calls below it, after every step and around checkpoints.
- `launch`, `LaunchConfig`: an elastic agent from a Python program that srun starts on every node.
- `ElasticExecutor`, `LocalElasticExecutor`, `DebugElasticExecutor`, `ElasticJob`: submission with submitit.
- `ExitCode`, and the errors `SlurmElasticError`, `UsageError`, `LaunchError`, `WorkerFailedError`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from slurm_elastic._lazy import lazy

if TYPE_CHECKING:
    from slurm_elastic import trainer
    from slurm_elastic._version import __version__
    from slurm_elastic.data import ElasticSampler
    from slurm_elastic.elastic_state import ElasticState
    from slurm_elastic.errors import ExitCode, SlurmElasticError, UsageError
    from slurm_elastic.launcher import LaunchConfig, LaunchError, launch
    from slurm_elastic.submission import (
        DebugElasticExecutor,
        ElasticExecutor,
        ElasticJob,
        LocalElasticExecutor,
        WorkerFailedError,
    )
else:
    # A training script imports the trainer alone, and only an executor needs submitit.
    __getattr__ = lazy(
        __name__,
        {
            "DebugElasticExecutor": "submission",
            "ElasticExecutor": "submission",
            "ElasticJob": "submission",
            "ElasticSampler": "data",
            "ElasticState": "elastic_state",
            "ExitCode": "errors",
            "LaunchConfig": "launcher",
            "LaunchError": "launcher",
            "LocalElasticExecutor": "submission",
            "SlurmElasticError": "errors",
            "UsageError": "errors",
            "WorkerFailedError": "submission",
            "__version__": "_version",
            "launch": "launcher",
            "trainer": "",
        },
    )

__all__ = [
    "DebugElasticExecutor",
    "ElasticExecutor",
    "ElasticJob",
    "ElasticSampler",
    "ElasticState",
    "ExitCode",
    "LaunchConfig",
    "LaunchError",
    "LocalElasticExecutor",
    "SlurmElasticError",
    "UsageError",
    "WorkerFailedError",
    "__version__",
    "launch",
    "trainer",
]


def __dir__() -> list[str]:
    return sorted(__all__)
