"""The durable records of one incarnation of a run: epochs, the leader's endpoint, rounds, and the end.

Records hold for all agents and outlive each of them; they fence a superseded leader. The run directory keeps them
unless the run uses etcd, and here is the choice between the two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from slurm_elastic.errors import ExitCode, RecordsError, UsageError
from slurm_elastic.rendezvous.records.etcd.config import (
    ENVIRONMENT_PREFIX,
    OPTIONS,
    TORCH_NAMES,
    EtcdConfig,
    load_config,
)
from slurm_elastic.rundir import RunDir

if TYPE_CHECKING:
    from slurm_elastic.rendezvous.records.etcd.records import EtcdRecords

Records: TypeAlias = "RunDirRecords | EtcdRecords"
Record = Mapping[str, Any]
"""A JSON object; all of its values can be written as JSON."""


class RecordsUnreachableError(RecordsError):
    """etcd did not answer within the time limit; it may answer later."""

    exit_code = ExitCode.LEFT


class RecordsInterruptedError(RecordsError):
    """A signal, or :meth:`RunDirRecords.stop_waiting`, has ended a wait for etcd."""

    exit_code = ExitCode.LEFT


@dataclass(frozen=True, slots=True)
class Situation:
    """The records that an agent needs to find the run's leader.

    Attributes:
        number: Number of the highest round written, None before the first.
    """

    endpoint: Record | None
    number: int | None
    round: Record | None


class RunDirRecords:
    """The records in the run directory; see :func:`~slurm_elastic.rundir.incarnation` for what an incarnation is.

    Epochs, endpoint and failure belong to the incarnation. Rounds and DONE belong to the run as a whole.

    Every method may block until file system or etcd answers, so call it outside of event loops, and may raise
    RecordsError. Methods are safe among threads, processes and nodes.
    """

    def __init__(self, run_dir: RunDir, incarnation: str) -> None:
        self._run_dir = run_dir
        self._incarnation = incarnation

    def newest_epoch(self, *, can_wait: bool = True) -> int | None:
        """Return the highest epoch taken, None before the first.

        Args:
            can_wait: False where the caller must not wait for an etcd that is silent: then the copy in the run
                directory counts.
        """
        return self._run_dir.newest("epochs", self._incarnation)

    def claim_epoch(self, number: int, record: Record) -> bool:
        """Take an epoch. Returns False if another agent has it."""
        return self._run_dir.claim_record(record, "epochs", self._incarnation, number)

    def publish_endpoint(self, record: Record) -> None:
        """Publish the leader's endpoint in place of an earlier one."""
        self._run_dir.publish_record(record, "endpoints", self._incarnation)

    def claim_round(self, number: int, record: Record) -> bool:
        """Write the record of a round. Returns False if another leader has written it."""
        return self._run_dir.claim_record(record, "rounds", number)

    def last_round(self) -> int | None:
        """Return the highest round written, None before the first."""
        return self._run_dir.newest("rounds")

    def situation(self, known_round: int | None = None) -> Situation:
        """Return the leader's endpoint and the newest round, by one request to etcd.

        Args:
            known_round: Number of a round whose record the caller does not need again: no record of a round ever
                changes, and that of thousands of agents is megabytes.
        """
        # An endpoint that was cut short, as by a power loss of the file server, counts as missing.
        endpoint = self._run_dir.whole_record("endpoints", self._incarnation)
        number = self._run_dir.newest("rounds", known=known_round)
        record = None if number is None or number == known_round else self._run_dir.read_record("rounds", number)
        return Situation(endpoint, number, record)

    def mark_done(self, record: Record) -> bool:
        """Write the record that the run is finished. Returns False if there was one, which stays."""
        return self._run_dir.mark_done(record)

    def is_done(self) -> bool:
        """Return True if the run is finished."""
        return self._run_dir.is_done()

    def publish_failure(self, record: Record) -> None:
        """Write the record of why the run failed in this incarnation."""
        self._run_dir.publish_record(record, "failures", self._incarnation)

    def failure(self) -> Record | None:
        """Return the record of why the run failed in this incarnation, None if it did not."""
        return self._run_dir.read_record("failures", self._incarnation)

    def on_loss(self, report: Callable[[RecordsError], None]) -> None:
        """Have `report` called once, from any thread, when etcd counts as lost while no call waits for it.

        A call that uses the file system raises when it fails.
        """

    def stop_waiting(self) -> None:
        """End all waits for etcd, not for a file system, by RecordsInterruptedError; later calls wait 2 s at most."""

    def close(self) -> None:
        """End connections and threads of the records. The records stay."""


def is_etcd(endpoint: str) -> bool:
    """Return True if an endpoint is that of an etcd and not that of a leader."""
    return endpoint.strip().startswith(("etcd://", "etcds://"))


def etcd_wanted(
    endpoint: str | None, options: Mapping[str, object], environment: Mapping[str, str]
) -> EtcdConfig | None:
    """Return how to reach etcd if it keeps the records of the run, None if the run directory does.

    Args:
        endpoint: ``--rdzv-endpoint``. ``etcd://`` and ``etcds://`` select etcd; HOST:PORT is the leader's endpoint.
        environment: Without an endpoint, SLURM_ELASTIC_ETCD_ENDPOINT or _CREDENTIALS select etcd.

    Raises:
        UsageError: An invalid value, or options of etcd without an etcd.
    """
    variables = any(environment.get(ENVIRONMENT_PREFIX + name.upper()) for name in ("endpoint", "credentials"))
    is_asked = is_etcd(endpoint) if endpoint else variables or bool(options.get("credentials"))
    if is_asked:
        return load_config(endpoint or "", options, environment)
    if names := sorted(name for name in (*OPTIONS, *TORCH_NAMES) if options.get(name)):
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
        limit: Seconds after which an etcd that does not answer counts as lost.
        interrupted: Called every 0.1 s while the main thread waits for etcd; True ends that wait.

    Raises:
        UsageError: The endpoint is no etcd, or etcd refuses user, password or certificate.
        RecordsError: etcd does not answer, or is full.
    """
    if etcd is None:
        return RunDirRecords(run_dir, incarnation)
    # The imports of etcd's client take a while, and most runs use none.
    from slurm_elastic.rendezvous.records.etcd.records import EtcdRecords

    return EtcdRecords(etcd, run_dir, incarnation, limit, interrupted)
