"""Failures of workers: their causes, whether one is the last one again, nodes with strikes, and loops. Pure."""

from slurm_elastic.failures.attribution import (
    BEFORE_FIRST_STEP,
    Attribution,
    attribute,
    ending,
    error_line,
    explanation,
    fingerprint,
    named,
    position,
    without_prefixes,
)
from slurm_elastic.failures.loops import Loop, find_loops
from slurm_elastic.failures.registry import BY_KERNEL, BY_WATCHDOG, Cause, Domain, Outlook, registry
from slurm_elastic.failures.strikes import (
    EXPIRY,
    Strike,
    bad_domains,
    bad_nodes,
    exclusion,
    node_domains,
    nodes_to_exclude,
    strikes,
)

__all__ = [
    "BEFORE_FIRST_STEP",
    "BY_KERNEL",
    "BY_WATCHDOG",
    "EXPIRY",
    "Attribution",
    "Cause",
    "Domain",
    "Loop",
    "Outlook",
    "Strike",
    "attribute",
    "bad_domains",
    "bad_nodes",
    "ending",
    "error_line",
    "exclusion",
    "explanation",
    "find_loops",
    "fingerprint",
    "named",
    "node_domains",
    "nodes_to_exclude",
    "position",
    "registry",
    "strikes",
    "without_prefixes",
]
