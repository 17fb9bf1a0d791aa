"""Jobs of Slurm that agents of these tests are in, and an agent that has ended."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from slurm_elastic.agent.job.job_end_effects import JobAtEnd
from slurm_elastic.agent.option_values import OptionValues
from slurm_elastic.rendezvous.connect import RendezvousConfig
from slurm_elastic.rendezvous.transport.messages import Successor
from slurm_elastic.rundir import RunDir
from slurm_elastic.slurm import Controller, SlurmJob

_ON_N1 = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NODEID": "0", "SLURMD_NODENAME": "n1"}


def slurm_job(nodes: str = "n1", **variables: str) -> SlurmJob:
    """Return job 7 of these nodes as the agent of n1 sees it, as far as the variables of Slurm do not say otherwise."""
    lists = {"SLURM_JOB_NODELIST": nodes, "SLURM_STEP_NODELIST": nodes}
    job = SlurmJob.from_environment({**_ON_N1, **lists, **variables})
    assert job is not None
    return job


def at_end(
    job: SlurmJob, controller: Controller, *, signal_fd: int = -1, told: Sequence[Successor] = (), **more: Any
) -> JobAtEnd:
    """Return what it does for its job; the run has no records."""
    agent = f"{job.node}/{job.job_id}.0/2"
    rendezvous = SimpleNamespace(run_dir=RunDir(Path("runs"), job.job_id), agent=agent, incarnation="7.0")
    facts = (job, cast(RendezvousConfig, rendezvous), OptionValues(), told, signal_fd)
    return JobAtEnd(*facts, controller=controller, **more)
