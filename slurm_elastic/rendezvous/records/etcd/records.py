"""The records of a run in etcd, with a copy in the run directory.

Under the run's prefix::

    done                               the run is finished
    round                              the newest round; earlier ones are not kept in etcd
    scopes/<incarnation>/epochs/000001 one per leader's term
    scopes/<incarnation>/endpoint      address and port of the leader
    scopes/<incarnation>/failure       why the run failed in that incarnation

All keys are under one lease of the run, and etcd deletes them within a minute after its end. DONE and the numbers of
rounds and epochs, which later starts need, have a copy in the run directory; so has the leader's endpoint, for the
commands of operators, and for agents if etcd has none that the run has written. etcd decides while the run lives.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from typing import TypeVar
from urllib.parse import quote

from slurm_elastic.rendezvous.records.api import (
    Record,
    RecordsError,
    RecordsUnreachableError,
    RunDirRecords,
    Situation,
)
from slurm_elastic.rendezvous.records.etcd.client import EtcdClient
from slurm_elastic.rendezvous.records.etcd.config import EtcdConfig
from slurm_elastic.rendezvous.records.etcd.leased_records import LeasedRecords
from slurm_elastic.rundir import RunDir

logger = logging.getLogger(__name__)

_DONE, _ROUND = "done", "round"

_START_SECONDS = 30.0
"""How long an agent that starts waits for an etcd that does not answer."""

_T = TypeVar("_T")


def open_etcd_records(
    config: EtcdConfig,
    run_dir: RunDir,
    incarnation: str,
    *,
    limit: float,
    interrupted: Callable[[], bool] = lambda: False,
) -> EtcdRecords:
    """Connect to etcd and open the records of a run there.

    Args:
        config: How to reach etcd.
        run_dir: The run directory, opened; it has the run's secret and the copy.
        incarnation: The incarnation of the caller.
        limit: Seconds that calls wait for an answer, and after which a silent etcd counts as lost.
        interrupted: Called every 0.1 s while the main thread waits; True ends that wait.

    Raises:
        UsageError: The endpoint is no etcd, or etcd refuses user, password or certificate, or the run's secret cannot
            be read.
        RecordsError: etcd does not answer, or is full.
    """
    records = EtcdRecords(config, run_dir, incarnation, limit, interrupted)
    try:
        records.enter(min(limit, _START_SECONDS))
    except BaseException:
        records.close()
        raise
    return records


class EtcdRecords(LeasedRecords):
    """Keeps the records of one incarnation in etcd; see :class:`~slurm_elastic.rendezvous.records.api.Records`.

    Args:
        config: How to reach etcd.
        run_dir: The run directory, opened; it has the run's secret and the copy.
        incarnation: The incarnation to which epochs, endpoint and failure belong.
        limit: Seconds that calls wait for an answer, and after which a silent etcd counts as lost.
        interrupted: Called every 0.1 s while the main thread waits; True ends that wait.
    """

    def __init__(
        self, config: EtcdConfig, run_dir: RunDir, incarnation: str, limit: float, interrupted: Callable[[], bool]
    ) -> None:
        secret = run_dir.secret()
        super().__init__(EtcdClient(config), config.run_prefix(run_dir.run_id), secret, limit, interrupted)
        self._copy = RunDirRecords(run_dir, incarnation)
        self._own = f"scopes/{quote(incarnation, safe='')}/"
        self._epochs = f"{self._own}epochs/"
        self._endpoint = f"{self._own}endpoint"
        self._copy_failed = self._silent = False
        self._opening: dict[tuple[str, ...], Mapping[str, Record]] = {}
        self._opening_ends = 0.0

    def enter(self, timeout: float) -> None:
        """Check that etcd can be used, and read by the same request all records that an agent needs when it starts.

        Raises:
            EtcdError: etcd cannot be used; the subclass says why.
        """
        records = self.connect(timeout)
        # The answer to each question that an agent asks soon after, once.
        self._opening = {
            keys: {name: record for name, record in records.items() if name.startswith(keys)}
            for keys in ((self._epochs,), (self._endpoint, _ROUND), (_DONE,))
        }
        self._opening_ends = time.monotonic() + self.client.config.times.fresh
        # From here on only the leader logs members of etcd that are lost or back.
        self.client.connection.quiet = True

    def newest_epoch(self, *, can_wait: bool = True) -> int | None:
        """See Records."""
        copied = self._copied(self._copy.newest_epoch, None)
        try:
            # Without the copy only etcd has the answer, so this call waits for it all the same.
            hurried = not can_wait and copied is not None
            epochs = self._fresh(self._epochs) or self.read(self._epochs, can_wait=not hurried)
        except RecordsUnreachableError:
            if not hurried:
                raise
            self._silent = True
            return copied
        return _newest([*(int(key.removeprefix(self._epochs)) for key in epochs), copied])

    def claim_epoch(self, number: int, record: Record) -> bool:
        """See Records."""
        self._opening.clear()
        self.written.clear()
        self.leads = lambda: (self.newest_epoch() or number) <= number
        won = self.create(f"{self._epochs}{number:06d}", record)
        if won and self._copied(lambda: self._copy.claim_epoch(number, record), True):
            self.client.connection.quiet, self.logs = False, True
            return True
        return False

    def epoch(self, number: int) -> Record | None:
        """See Records."""
        record = self._read(f"{self._epochs}{number:06d}")
        return record if record is not None else self._copied(lambda: self._copy.epoch(number), None)

    def publish_endpoint(self, record: Record) -> None:
        """See Records."""
        self.put(self._endpoint, record)
        # For `slurm-elastic drain` and the like, which know the run directory only.
        self._copied(lambda: self._copy.publish_endpoint(record), None)

    def endpoint(self) -> Record | None:
        """See Records."""
        return self._read(self._endpoint)

    def claim_round(self, number: int, record: Record) -> bool:
        """See Records."""
        entry = {"number": number, "record": record}
        won = self.replace(_ROUND, entry, lambda there: int(there["number"]) < number)
        return won and self._copied(lambda: self._copy.claim_round(number, record), True)

    def last_round(self) -> int | None:
        """See Records."""
        return self._last(self._read(_ROUND))

    def round(self, number: int) -> Record | None:
        """See Records."""
        return self._record(self._read(_ROUND), number)

    def situation(self, known_round: int | None = None) -> Situation:
        """See Records."""
        records = self._fresh(self._endpoint, _ROUND)
        if not records or self._endpoint not in records:
            # A leader may have come since then.
            records = self.read(self._endpoint, _ROUND)
        endpoint = records.get(self._endpoint)
        if endpoint is None:
            # Other users of etcd can write over it, again and again; only agents of this run write the copy.
            endpoint = self._copied(self._copy.endpoint, None)
        newest = records.get(_ROUND)
        number = self._last(newest)
        return Situation(
            endpoint, number, None if number is None or number == known_round else self._record(newest, number)
        )

    def mark_done(self, record: Record) -> bool:
        """See Records. The copy is enough, so the end of a run does not wait for etcd."""
        try:
            first = self._copy.mark_done(record)
        except RecordsError as error:
            self._log_failure(error)
            return self.create(_DONE, record)
        try:
            # One call that found etcd silent is enough.
            if not self._silent:
                self.create(_DONE, record, can_wait=False)
                return first
        except RecordsError as error:
            logger.debug("%s", error)
        logger.warning("only the run directory has the record that the run is finished: etcd does not take it")
        return first

    def is_done(self) -> bool:
        """See Records."""
        if self._copied(self._copy.is_done, False):
            return True
        records = self._fresh(_DONE)
        return bool(self.read(_DONE) if records is None else records)

    def publish_failure(self, record: Record) -> None:
        """See Records. The copy alone is enough, so the end of a run does not wait for etcd."""
        self._copied(lambda: self._copy.publish_failure(record), None)
        with contextlib.suppress(RecordsError):
            self.put(f"{self._own}failure", record, can_wait=False)

    def failure(self) -> Record | None:
        """See Records."""
        return self._read(f"{self._own}failure")

    def _fresh(self, *keys: str) -> Mapping[str, Record] | None:
        """Return what an agent that has just started has read of some keys; None if it has to ask etcd."""
        return self._opening.pop(keys, None) if time.monotonic() < self._opening_ends else None

    def _read(self, key: str) -> Record | None:
        return self.read(key).get(key)

    def _last(self, newest: Record | None) -> int | None:
        return _newest([newest["number"] if newest else None, self._copied(self._copy.last_round, None)])

    def _record(self, newest: Record | None, number: int) -> Record | None:
        if newest is not None and newest["number"] == number:
            return dict(newest["record"])
        return self._copied(lambda: self._copy.round(number), None)

    def _copied(self, call: Callable[[], _T], otherwise: _T) -> _T:
        """Read or write the copy; without one, only etcd has the records."""
        try:
            return call()
        except RecordsError as error:
            self._log_failure(error)
            return otherwise

    def _log_failure(self, error: RecordsError) -> None:
        if not self._copy_failed:
            self._copy_failed = True
            logger.warning("%s; the run goes on with etcd alone", error)


def _newest(numbers: list[int | None]) -> int | None:
    return max((number for number in numbers if number is not None), default=None)
