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

_SCHEMES = ("etcd://", "etcds://")
_SELECTING = ("endpoint", "credentials")


def is_etcd(endpoint: str) -> bool:
    """Return True if an endpoint is that of an etcd and not that of a leader."""
    return endpoint.strip().startswith(_SCHEMES)


def etcd_wanted(
    endpoint: str | None, options: Mapping[str, object], environment: Mapping[str, str]
) -> EtcdConfig | None:
    """Return how to reach etcd if it keeps the records of the run, None if the run directory does.

    Args:
        endpoint: ``--rdzv-endpoint``. ``etcd://`` and ``etcds://`` select etcd; HOST:PORT is the leader's endpoint.
        options: ``--rdzv-conf``.
        environment: Without an endpoint, SLURM_ELASTIC_ETCD_ENDPOINT or _CREDENTIALS select etcd.

    Raises:
        UsageError: An invalid value, or options of etcd without an etcd.
    """
    names = sorted(name for name in (*OPTIONS, *TORCH_NAMES) if options.get(name))
    if endpoint and not is_etcd(endpoint):
        asked = False
    else:
        variables = any(environment.get(ENVIRONMENT_PREFIX + name.upper()) for name in _SELECTING)
        asked = bool(endpoint) or variables or bool(options.get("credentials"))
    if asked:
        return load_config(endpoint or "", options, environment)
    if names:
        raise UsageError(
            f"--rdzv-conf: {names[0]} is for etcd, and none is named; give --rdzv-endpoint=etcd://HOST:PORT"
        )
    return None


def open_records(
    run_dir: RunDir,
    incarnation: str,
    etcd: EtcdConfig | None,
    *,
    limit: float,
    interrupted: Callable[[], bool] = lambda: False,
) -> Records:
    """Open the records of one incarnation of a run; the caller closes them.

    Args:
        run_dir: The run directory, opened.
        incarnation: The incarnation of the caller.
        etcd: How to reach etcd; None for the run directory.
        limit: Seconds after which an etcd that does not answer counts as lost.
        interrupted: Called every 0.1 s while the main thread waits for etcd; True ends that wait.

    Raises:
        UsageError: The endpoint is no etcd, or etcd refuses user, password or certificate.
        RecordsError: etcd does not answer, or is full.
    """
    if etcd is None:
        return RunDirRecords(run_dir, incarnation)
    # The imports of etcd's client take a while, and most runs use none.
    from slurm_elastic.rendezvous.records.etcd.records import open_etcd_records

    return open_etcd_records(etcd, run_dir, incarnation, limit=limit, interrupted=interrupted)
