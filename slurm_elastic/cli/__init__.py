"""The command ``slurm-elastic``."""

from slurm_elastic.cli.main import main

__all__ = ["main"]
