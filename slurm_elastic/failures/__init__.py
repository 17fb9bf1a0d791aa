"""Failures of workers: their causes, whether one is the last one again, and nodes with strikes. Pure."""

from slurm_elastic.failures.attribution import Attribution, attribute, explanation, named, without_prefixes
from slurm_elastic.failures.registry import BY_KERNEL, BY_WATCHDOG, REGISTRY, Cause, Domain, Outlook, mistakes
from slurm_elastic.failures.repetition import BEFORE_FIRST_STEP, fingerprint, position
from slurm_elastic.failures.strikes import EXPIRY, Strike, exclusion, nodes_to_exclude, strikes

__all__ = [
    "BEFORE_FIRST_STEP",
    "BY_KERNEL",
    "BY_WATCHDOG",
    "EXPIRY",
    "REGISTRY",
    "Attribution",
    "Cause",
    "Domain",
    "Outlook",
    "Strike",
    "attribute",
    "exclusion",
    "explanation",
    "fingerprint",
    "mistakes",
    "named",
    "nodes_to_exclude",
    "position",
    "strikes",
    "without_prefixes",
]
