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
import time
from collections.abc import Callable, Collection, Mapping
from typing import TypeVar
from urllib.parse import quote

from slurm_elastic.rendezvous.records.api import (
    Record,
    RecordsError,
    RecordsInterruptedError,
    RecordsUnreachableError,
    RunDirRecords,
    Situation,
)
from slurm_elastic.rendezvous.records.etcd.client import EtcdClient
from slurm_elastic.rendezvous.records.etcd.config import EtcdConfig
from slurm_elastic.rendezvous.records.etcd.errors import EtcdInterruptedError, EtcdUnavailableError
from slurm_elastic.rendezvous.records.etcd.leased_records import LeasedRecords
from slurm_elastic.rundir import RunDir

__all__ = ["EtcdRecords", "open_etcd_records"]

logger = logging.getLogger(__name__)

_DONE, _ROUND = "done", "round"

_START_SECONDS = 30.0
"""How long an etcd that does not answer at all is waited for when an agent starts."""

_FRESH_SECONDS = 2.0
"""How long an agent that starts may rely on what it found when it was let in."""

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
    leased = LeasedRecords(EtcdClient(config), config.run_prefix(run_dir.run_id), secret, limit, interrupted)
    records = EtcdRecords(leased, RunDirRecords(run_dir, scope), scope)
    try:
        records.enter(min(limit, _START_SECONDS))
        return records
    except BaseException as error:
        records.close()
        if isinstance(error, EtcdInterruptedError):
            raise RecordsInterruptedError(str(error)) from error
        if isinstance(error, EtcdUnavailableError):
            raise RecordsUnreachableError(str(error)) from error
        raise


class EtcdRecords:
    """Keeps the records of one scope in etcd; see :class:`~slurm_elastic.rendezvous.records.api.Records`.

    Args:
        leased: of the run.
        copy: in the run directory.
        scope: whose records these are.
    """

    def __init__(self, leased: LeasedRecords, copy: RunDirRecords, scope: str) -> None:
        self._leased = leased
        self._copy = copy
        self._scope = f"scopes/{quote(scope, safe='')}/"
        self._epochs = f"{self._scope}epochs/"
        self._endpoint = f"{self._scope}endpoint"
        self._copy_failed = self._silent = False
        self._opening = _Opening()

    def enter(self, timeout: float) -> None:
        """Ask etcd to be let in, and in the same breath for what an agent wants to know when it starts.

        Raises:
            EtcdError: See :meth:`LeasedRecords.enter`.
        """
        self._opening = _Opening(self._leased.enter(timeout))
        # From here on only the leader tells about members that come and go.
        self._leased.speak(False)

    def newest_epoch(self, *, patient: bool = True) -> int | None:
        """See Records."""
        copied = self._copied(self._copy.newest_epoch, None)
        try:
            # Without the copy there is nothing else to go by than etcd, so that is waited for all the same.
            hurried = not patient and copied is not None
            found = self._opening.take(self._epochs) or self._leased.read(self._epochs, patient=not hurried)
        except RecordsUnreachableError:
            if not hurried:
                raise
            self._silent = True
            return copied
        return _newest([*(int(key.removeprefix(self._epochs)) for key in found), copied])

    def claim_epoch(self, number: int, record: Record) -> bool:
        """See Records."""
        self._opening = _Opening()
        self._leased.begin(lambda: (self.newest_epoch() or number) <= number)
        won = self._leased.create(f"{self._epochs}{number:06d}", record)
        if won and self._copied(lambda: self._copy.claim_epoch(number, record), True):
            self._leased.speak(True)
            return True
        return False

    def epoch(self, number: int) -> Record | None:
        """See Records."""
        record = self._read(f"{self._epochs}{number:06d}")
        return record if record is not None else self._copied(lambda: self._copy.epoch(number), None)

    def publish_endpoint(self, record: Record) -> None:
        """See Records."""
        self._leased.put(self._endpoint, record)
        # For `slurm-elastic drain` and the like, which know the run directory only.
        self._copied(lambda: self._copy.publish_endpoint(record), None)

    def endpoint(self) -> Record | None:
        """See Records."""
        return self._read(self._endpoint)

    def claim_round(self, number: int, record: Record) -> bool:
        """See Records."""
        entry = {"number": number, "record": record}
        won = self._leased.replace(_ROUND, entry, lambda there: int(there["number"]) < number)
        return won and self._copied(lambda: self._copy.claim_round(number, record), True)

    def last_round(self) -> int | None:
        """See Records."""
        return self._last(self._read(_ROUND))

    def round(self, number: int) -> Record | None:
        """See Records."""
        return self._record(self._read(_ROUND), number)

    def situation(self) -> Situation:
        """See Records."""
        found = self._opening.take(self._endpoint, _ROUND)
        if not found or self._endpoint not in found:
            # A leader may have come since then.
            found = self._leased.read(self._endpoint, _ROUND)
        newest = found.get(_ROUND)
        number = self._last(newest)
        return Situation(found.get(self._endpoint), number, None if number is None else self._record(newest, number))

    def mark_done(self, record: Record) -> bool:
        """See Records. The copy alone is enough, so the end of a run does not wait for etcd."""
        try:
            first = self._copy.mark_done(record)
        except RecordsError as error:
            self._tell(error)
            return self._leased.create(_DONE, record)
        try:
            # Once is enough to find out that etcd is silent.
            if not self._silent:
                self._leased.create(_DONE, record, patient=False)
                return first
        except RecordsError as error:
            logger.debug("%s", error)
        logger.warning("that the run is finished is written in the run directory alone: etcd does not take it")
        return first

    def is_done(self) -> bool:
        """See Records."""
        if self._copied(self._copy.is_done, False):
            return True
        found = self._opening.take(_DONE)
        return bool(self._leased.read(_DONE) if found is None else found)

    def publish_failure(self, record: Record) -> None:
        """See Records. The copy alone is enough, so the end of a run does not wait for etcd."""
        self._copied(lambda: self._copy.publish_failure(record), None)
        with contextlib.suppress(RecordsError):
            self._leased.put(f"{self._scope}failure", record, patient=False)

    def failure(self) -> Record | None:
        """See Records."""
        return self._read(f"{self._scope}failure")

    def on_loss(self, tell: Callable[[RecordsError], None]) -> None:
        """See Records."""
        self._leased.on_loss(tell)

    def stop_waiting(self) -> None:
        """See Records."""
        self._leased.stop_waiting()

    def close(self) -> None:
        """See Records."""
        self._leased.close()

    def _read(self, key: str) -> Record | None:
        return self._leased.read(key).get(key)

    def _last(self, newest: Record | None) -> int | None:
        return _newest([newest["number"] if newest else None, self._copied(self._copy.last_round, None)])

    def _record(self, newest: Record | None, number: int) -> Record | None:
        if newest is not None and newest["number"] == number:
            return dict(newest["record"])
        return self._copied(lambda: self._copy.round(number), None)

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


class _Opening:
    """The records that an agent found when it was let in: the answer to each question that it asks soon after, once."""

    def __init__(self, found: Mapping[str, Record] | None = None) -> None:
        self._found = found
        self._told: set[str] = set()
        self._until = time.monotonic() + _FRESH_SECONDS

    def take(self, *keys: str) -> Mapping[str, Record] | None:
        """Return what was there; None if this was told before, or is too long ago."""
        if self._found is None or time.monotonic() > self._until or not self._told.isdisjoint(keys):
            return None
        self._told.update(keys)
        return {name: record for name, record in self._found.items() if _is_among(name, keys)}


def _is_among(name: str, keys: Collection[str]) -> bool:
    return any(name == key or (key.endswith("/") and name.startswith(key)) for key in keys)


def _newest(numbers: list[int | None]) -> int | None:
    return max((number for number in numbers if number is not None), default=None)
