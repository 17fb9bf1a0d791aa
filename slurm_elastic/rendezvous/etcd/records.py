"""The records of a run in etcd, with a copy in the run directory.

Under the run's prefix::

    done                               the run is finished
    round                              the newest round; of earlier ones nobody asks etcd
    scopes/<scope>/epochs/000001       one per leader's term
    scopes/<scope>/endpoint            where the leader is
    scopes/<scope>/failure             why the run failed in that scope

All keys live under one lease of the run and are gone within a minute after its end. What has to be known later, DONE
and the numbers of rounds and epochs, is also in the run directory; so is the leader's place, for the commands of
operators. etcd decides while the run lives.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import TypeVar
from urllib.parse import quote

from slurm_elastic.rendezvous.etcd.cabinet import Cabinet
from slurm_elastic.rendezvous.etcd.client import EtcdClient
from slurm_elastic.rendezvous.etcd.credentials import EtcdConfig
from slurm_elastic.rendezvous.etcd.errors import EtcdInterruptedError, EtcdUnavailableError
from slurm_elastic.rendezvous.records import (
    Record,
    RecordsError,
    RecordsInterruptedError,
    RecordsUnreachableError,
    RunDirRecords,
)
from slurm_elastic.rundir import RunDir

__all__ = ["EtcdRecords", "open_etcd_records"]

logger = logging.getLogger(__name__)

_START_SECONDS = 30.0
"""How long an etcd that does not answer at all is waited for when an agent starts."""

_T = TypeVar("_T")


def open_etcd_records(
    config: EtcdConfig,
    run_dir: RunDir,
    scope: str,
    *,
    limit: float,
    interrupted: Callable[[], bool] = lambda: False,
) -> EtcdRecords:
    """Connect to etcd and open the records of a run there.

    Args:
        config: where etcd is.
        run_dir: opened; with the run's secret, and for the copy.
        scope: whose records these are.
        limit: seconds that calls wait for an answer, and after which a silent etcd is given up for lost.
        interrupted: asked every 0.1 s while the main thread waits; True ends that wait.

    Raises:
        UsageError: etcd is not what the options say, or does not let us in, or the run's secret cannot be used.
        RecordsError: etcd does not answer, or is full.
    """
    secret = run_dir.secret()
    client = EtcdClient(config)
    try:
        client.limited(min(limit, _START_SECONDS), interrupted).connect()
        # From here on only the leader tells about members that come and go.
        client.quiet = True
        return EtcdRecords(
            Cabinet(client, config.run_prefix(run_dir.run_id), secret, limit, interrupted),
            RunDirRecords(run_dir, scope),
            scope,
        )
    except BaseException as error:
        client.close()
        if isinstance(error, EtcdInterruptedError):
            raise RecordsInterruptedError(str(error)) from error
        if isinstance(error, EtcdUnavailableError):
            raise RecordsUnreachableError(str(error)) from error
        raise


class EtcdRecords:
    """Keeps the records of one scope in etcd; see :class:`~slurm_elastic.rendezvous.records.Records`.

    Args:
        cabinet: of the run.
        copy: in the run directory.
        scope: whose records these are.
    """

    def __init__(self, cabinet: Cabinet, copy: RunDirRecords, scope: str) -> None:
        self._cabinet = cabinet
        self._copy = copy
        self._scope = f"scopes/{quote(scope, safe='')}/"
        self._epochs = f"{self._scope}epochs/"
        self._copy_failed = False

    def newest_epoch(self) -> int | None:
        """See Records."""
        return _newest([*map(int, self._cabinet.read_all(self._epochs)), self._copied(self._copy.newest_epoch, None)])

    def claim_epoch(self, number: int, record: Record) -> bool:
        """See Records."""
        self._cabinet.begin(lambda: (self.newest_epoch() or number) <= number)
        won = self._cabinet.create(f"{self._epochs}{number:06d}", record)
        if won and self._copied(lambda: self._copy.claim_epoch(number, record), True):
            self._cabinet.speak()
            return True
        return False

    def epoch(self, number: int) -> Record | None:
        """See Records."""
        record = self._cabinet.read(f"{self._epochs}{number:06d}")
        return record if record is not None else self._copied(lambda: self._copy.epoch(number), None)

    def publish_endpoint(self, record: Record) -> None:
        """See Records."""
        self._cabinet.put(f"{self._scope}endpoint", record)
        # For `slurm-elastic drain` and the like, which know the run directory only.
        self._copied(lambda: self._copy.publish_endpoint(record), None)

    def endpoint(self) -> Record | None:
        """See Records."""
        return self._cabinet.read(f"{self._scope}endpoint")

    def claim_round(self, number: int, record: Record) -> bool:
        """See Records."""
        entry = {"number": number, "record": record}
        won = self._cabinet.replace("round", entry, lambda there: int(there["number"]) < number)
        return won and self._copied(lambda: self._copy.claim_round(number, record), True)

    def last_round(self) -> int | None:
        """See Records."""
        newest = self._cabinet.read("round")
        return _newest([newest["number"] if newest else None, self._copied(self._copy.last_round, None)])

    def round(self, number: int) -> Record | None:
        """See Records."""
        newest = self._cabinet.read("round")
        if newest is not None and newest["number"] == number:
            return dict(newest["record"])
        return self._copied(lambda: self._copy.round(number), None)

    def mark_done(self, record: Record) -> bool:
        """See Records. The copy alone is enough, so the end of a run does not wait for etcd."""
        try:
            first = self._copy.mark_done(record)
        except RecordsError as error:
            self._tell(error)
            return self._cabinet.create("done", record)
        with contextlib.suppress(RecordsError):
            self._cabinet.create("done", record, patient=False)
        return first

    def is_done(self) -> bool:
        """See Records."""
        return self._copied(self._copy.is_done, False) or self._cabinet.read("done") is not None

    def publish_failure(self, record: Record) -> None:
        """See Records. The copy alone is enough, so the end of a run does not wait for etcd."""
        self._copied(lambda: self._copy.publish_failure(record), None)
        with contextlib.suppress(RecordsError):
            self._cabinet.put(f"{self._scope}failure", record, patient=False)

    def failure(self) -> Record | None:
        """See Records."""
        return self._cabinet.read(f"{self._scope}failure")

    def on_loss(self, tell: Callable[[RecordsError], None]) -> None:
        """See Records."""
        self._cabinet.on_loss(tell)

    def stop_waiting(self) -> None:
        """See Records."""
        self._cabinet.stop_waiting()

    def close(self) -> None:
        """See Records."""
        self._cabinet.close()

    def _copied(self, call: Callable[[], _T], otherwise: _T) -> _T:
        """Ask or change the copy; etcd goes on without one."""
        try:
            return call()
        except RecordsError as error:
            self._tell(error)
            return otherwise

    def _tell(self, error: RecordsError) -> None:
        if not self._copy_failed:
            self._copy_failed = True
            logger.warning("%s; the run goes on with etcd alone", error)


def _newest(numbers: list[int | None]) -> int | None:
    return max((number for number in numbers if number is not None), default=None)
