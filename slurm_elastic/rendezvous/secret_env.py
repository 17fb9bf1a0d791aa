"""Variables that an agent takes for itself. Imports nothing slow: this runs before the workers' process is started."""

from __future__ import annotations

from collections.abc import MutableMapping

PRIVATE = ("SLURM_ELASTIC_ETCD_PASSWORD", "SLURM_ELASTIC_HEALTH_TOKEN")
"""Variables that no worker may inherit."""


def take_private(environ: MutableMapping[str, str]) -> dict[str, str]:
    """Take out of an environment what workers must not inherit, and return it."""
    return {name: environ.pop(name) for name in PRIVATE if name in environ}
