"""Where a run keeps its state, as far as the command line and Slurm say it; without torch."""

from __future__ import annotations

from pathlib import Path

from slurm_elastic.slurm import SlurmJob

__all__ = ["base_directory"]


def base_directory(run_dir: str | None, job: SlurmJob | None) -> Path:
    """Return ``--run-dir``, else the directory that sbatch was called in, else the current one."""
    return Path(run_dir or (job.submit_dir if job else None) or Path.cwd())
