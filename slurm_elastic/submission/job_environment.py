"""``submitit.JobEnvironment()`` in a worker: ranks are those of the round, the job id is the run's."""

from __future__ import annotations

from typing import ClassVar

from submitit.core import job_environment

from slurm_elastic.submission.entry import job_id_of

__all__ = ["ElasticJobEnvironment"]


class ElasticJobEnvironment(job_environment.JobEnvironment):
    """What submitit's functions know about where they run.

    Found by submitit through the entry-point group ``submitit`` (submitit/core/plugins.py, 1.5.4).
    """

    _env: ClassVar[dict[str, str]] = {
        "job_id": "SLURM_ELASTIC_RUN_ID",
        "num_tasks": "WORLD_SIZE",
        "num_nodes": "GROUP_WORLD_SIZE",
        "node": "GROUP_RANK",
        "global_rank": "RANK",
        "local_rank": "LOCAL_RANK",
    }

    @property
    def raw_job_id(self) -> str:
        """The id that the job's files are named by."""
        return job_id_of(super().raw_job_id)
