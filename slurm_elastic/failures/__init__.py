"""Failures of workers: their causes, what another start can bring, and whether one is the last one again. Pure."""

from slurm_elastic.failures.attribution import Attribution, attribute, explanation, named, without_prefixes
from slurm_elastic.failures.registry import BY_KERNEL, BY_WATCHDOG, REGISTRY, Cause, Domain, Outlook, mistakes
from slurm_elastic.failures.repetition import BEFORE_FIRST_STEP, fingerprint, position

__all__ = [
    "BEFORE_FIRST_STEP",
    "BY_KERNEL",
    "BY_WATCHDOG",
    "REGISTRY",
    "Attribution",
    "Cause",
    "Domain",
    "Outlook",
    "attribute",
    "explanation",
    "fingerprint",
    "mistakes",
    "named",
    "position",
    "without_prefixes",
]
