"""``submitit.JobEnvironment()`` in a worker, with the ranks of the round and the job id of the run."""

from __future__ import annotations

from typing import ClassVar

from submitit.core import job_environment

from slurm_elastic.submission.payload import job_id_of


class ElasticJobEnvironment(job_environment.JobEnvironment):
    """The job environment of an elastic run, for functions that use submitit's.

    submitit finds this class through the entry-point group ``submitit`` (submitit/core/plugins.py, 1.5.4).
    """

    _env: ClassVar[dict[str, str]] = {
        "job_id": "SLURM_ELASTIC_RUN_ID",
        "num_tasks": "WORLD_SIZE",
        "num_nodes": "GROUP_WORLD_SIZE",
        "node": "GROUP_RANK",
        "global_rank": "RANK",
        "local_rank": "LOCAL_RANK",
    }

    def _requeue(self, countdown: int) -> None:
        """Do nothing: the agents requeue the job when its workers have ended."""

    @property
    def raw_job_id(self) -> str:
        """The job id in the names of the job's files."""
        return job_id_of(super().raw_job_id)
