"""Failures of workers: their causes, and what another start can bring. Pure."""

from slurm_elastic.failures.attribution import Attribution, attribute, explanation, named, without_prefixes
from slurm_elastic.failures.registry import BY_KERNEL, BY_WATCHDOG, REGISTRY, Cause, Domain, Outlook, mistakes

__all__ = [
    "BY_KERNEL",
    "BY_WATCHDOG",
    "REGISTRY",
    "Attribution",
    "Cause",
    "Domain",
    "Outlook",
    "attribute",
    "explanation",
    "mistakes",
    "named",
    "without_prefixes",
]
