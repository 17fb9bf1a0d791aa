"""Elastic PyTorch training on Slurm."""

from slurm_elastic._version import __version__

__all__ = ["__version__"]
