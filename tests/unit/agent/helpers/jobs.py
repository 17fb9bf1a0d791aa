"""An agent that has ended, in a job of these tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from slurm_elastic.agent.job.job_end_effects import JobAtEnd
from slurm_elastic.agent.option_values import RequeuePolicy
from slurm_elastic.rendezvous.records.api import Records
from slurm_elastic.rundir import RunDir
from slurm_elastic.slurm import Controller, SlurmJob


def at_end(job: SlurmJob, controller: Controller, *, signal_fd: int = -1, **more: Any) -> JobAtEnd:
    """Return what it does for its job; the run has no records."""
    run_dir, records = RunDir(Path("runs"), job.job_id), cast(Records, None)
    facts = (job, f"{job.node}/{job.job_id}.0/2", run_dir, records, "7.0", RequeuePolicy(), (), signal_fd)
    return JobAtEnd(*facts, controller=controller, **more)
