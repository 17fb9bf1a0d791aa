"""Which agent of a job asks Slurm why the job has to go, writes that down, and sees to the requeue."""

from __future__ import annotations

import json

from slurm_elastic.rendezvous.leave_requests import job_of
from slurm_elastic.rundir import RunDir, RunDirError
from slurm_elastic.slurm import SlurmJob

__all__ = ["is_asker"]


def is_asker(run_dir: RunDir, job: SlurmJob, agent: str) -> bool:
    """Whether it is this one: the agent of the job's first node, and without that the first one in the newest round.

    Reads the run directory, so it may block.

    Args:
        run_dir: of the run.
        job: of the agent.
        agent: its identity.
    """
    if job.node_rank == 0:
        return True
    try:
        newest = run_dir.last_round()
        record = None if newest is None else run_dir.round_record(newest)
    except RunDirError:
        return False
    places = json.loads(record).get("places", []) if record is not None else []
    of_job = [other for other in (str(place["agent"]) for place in places) if job_of(other) == job_of(agent)]
    return of_job[:1] == [agent]
