"""The choice between the run directory and etcd for the records of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from slurm_elastic.errors import UsageError
from slurm_elastic.rendezvous.records.api import Records, RunDirRecords
from slurm_elastic.rendezvous.records.etcd.config import (
    ENVIRONMENT_PREFIX,
    OPTIONS,
    TORCH_NAMES,
    EtcdConfig,
    load_config,
)
from slurm_elastic.rundir import RunDir

__all__ = ["etcd_wanted", "is_etcd", "open_records"]

_SCHEMES = ("etcd://", "etcds://")
_SELECTING = ("endpoint", "credentials")


def is_etcd(endpoint: str) -> bool:
    """Return True if an endpoint is that of an etcd and not that of a leader."""
    return endpoint.strip().startswith(_SCHEMES)


def etcd_wanted(
    endpoint: str | None, options: Mapping[str, object], environment: Mapping[str, str]
) -> EtcdConfig | None:
    """Return where etcd is if it keeps the records of the run, None if the run directory does.

    Args:
        endpoint: ``--rdzv-endpoint``. ``etcd://`` and ``etcds://`` ask for etcd; HOST:PORT is the leader's place.
        options: ``--rdzv-conf``.
        environment: without an endpoint, SLURM_ELASTIC_ETCD_ENDPOINT or _CREDENTIALS ask for etcd.

    Raises:
        UsageError: a value that cannot be, or options of etcd without one.
    """
    given = sorted(name for name in (*OPTIONS, *TORCH_NAMES) if options.get(name))
    if endpoint and not is_etcd(endpoint):
        asked = False
    else:
        variables = any(environment.get(ENVIRONMENT_PREFIX + name.upper()) for name in _SELECTING)
        asked = bool(endpoint) or variables or bool(options.get("credentials"))
    if asked:
        return load_config(endpoint or "", options, environment)
    if given:
        raise UsageError(
            f"--rdzv-conf: {given[0]} is for etcd, and none is named; give --rdzv-endpoint=etcd://HOST:PORT"
        )
    return None


def open_records(
    run_dir: RunDir,
    scope: str,
    etcd: EtcdConfig | None,
    *,
    limit: float,
    interrupted: Callable[[], bool] = lambda: False,
) -> Records:
    """Open the records of one scope of a run; to be closed by the caller.

    Args:
        run_dir: opened.
        scope: whose records these are.
        etcd: None for the run directory.
        limit: seconds after which an etcd that does not answer is given up for lost.
        interrupted: asked every 0.1 s while the main thread waits for etcd; True ends that wait.

    Raises:
        UsageError: etcd is not what the options say, or does not let us in.
        RecordsError: etcd does not answer, or is full.
    """
    if etcd is None:
        return RunDirRecords(run_dir, scope)
    # Its imports take a while, and most runs do without.
    from slurm_elastic.rendezvous.records.etcd.records import open_etcd_records

    return open_etcd_records(etcd, run_dir, scope, limit=limit, interrupted=interrupted)
