"""Sealed records under keys of etcd that live as long as any agent of the run, and are made again if they vanish."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from slurm_elastic.rendezvous.records.api import (
    Record,
    RecordsError,
    RecordsInterruptedError,
    RecordsUnreachableError,
)
from slurm_elastic.rendezvous.records.etcd.client import EtcdClient
from slurm_elastic.rendezvous.records.etcd.errors import (
    EtcdError,
    EtcdInterruptedError,
    EtcdLeaseLostError,
    EtcdUnavailableError,
)
from slurm_elastic.rendezvous.records.etcd.signed_values import open_record, seal_record
from slurm_elastic.rendezvous.records.etcd.transactions import Compare, Get, KeyValue, Put, TransactionResult
from slurm_elastic.text import printable

__all__ = ["LEASE_SECONDS", "LeasedRecords"]

logger = logging.getLogger(__name__)

LEASE_SECONDS = 45
"""How long the keys outlive the last agent of the run; with what etcd adds, less than a minute."""

_HURRIED_SECONDS = 2.0
_LOOKS_PER_LEASE = 9

_T = TypeVar("_T")


_FOREIGN_KEYS = 16
"""Keys of others that are named in the log."""


def _name(found: KeyValue) -> str:
    """A key as text; one that is no UTF-8, and so not of this project, in a form that can be shown."""
    return found.key.decode(errors="backslashreplace")


class LeasedRecords:
    """One agent's access to the records of its run in etcd.

    All agents keep one lease alive together, so that no single agent's end takes the records away. If etcd loses them
    all the same (it was cut off from every agent for longer than the lease, or came back empty), whoever wrote them
    writes them again.

    Args:
        client: connected to etcd.
        prefix: of the run's keys, with a slash at its end.
        secret: the run's.
        limit: seconds that calls wait for an answer, and after which a silent etcd is given up for lost.
        interrupted: asked every 0.1 s while the main thread waits; True ends that wait.
    """

    def __init__(
        self, client: EtcdClient, prefix: str, secret: bytes, limit: float, interrupted: Callable[[], bool]
    ) -> None:
        self.prefix = prefix
        self._client, self._secret, self._limit, self._interrupted = client, secret, limit, interrupted
        self._hurried = threading.Event()
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._written: dict[str, bytes] = {}
        self._foreign: set[str] = set()
        self._aloud = False
        self._lost: Callable[[RecordsError], None] = lambda error: None
        self._leads: Callable[[], bool] = lambda: True
        ttl = int(min(LEASE_SECONDS, max(5.0, limit)))
        # Most agents never write, so it is granted to those who do; all others only renew it.
        self._lease = client.shared_lease(prefix, ttl, grant=False)
        self._interval = ttl / _LOOKS_PER_LEASE
        self._thread = threading.Thread(target=self._look_after, name="etcd-records", daemon=True)
        self._thread.start()

    def on_loss(self, tell: Callable[[RecordsError], None]) -> None:
        """See :class:`~slurm_elastic.rendezvous.records.api.Records`."""
        self._lost = tell

    def stop_waiting(self) -> None:
        """See :class:`~slurm_elastic.rendezvous.records.api.Records`."""
        self._hurried.set()

    def close(self) -> None:
        """End all threads and the connection; the lease is left to run out, or to the others."""
        self._closed.set()
        self._client.close()
        self._thread.join()

    def enter(self, timeout: float) -> dict[str, dict[str, Any]]:
        """See that etcd can be used, and return all that it has of the run, by the way.

        Args:
            timeout: seconds to wait for an etcd that does not answer.

        Raises:
            EtcdError: it cannot be used; the subclass says why.
        """
        etcd = self._client.limited(timeout, self._interrupted)
        return self._opened(etcd.connect(Get(self.prefix, prefix=True)))

    def read(self, *keys: str, patient: bool = True) -> dict[str, dict[str, Any]]:
        """Return those of the records that are there, by their keys; of one moment.

        Args:
            keys: one with a slash at its end stands for all keys that begin so.
            patient: False to wait for etcd for a moment only.
        """
        gets = [Get(self.prefix + key, prefix=key.endswith("/")) for key in keys]
        responses = self._ask(lambda etcd: etcd.transaction((), gets), patient=patient).responses
        return self._opened(kv for response in responses for kv in response)

    def create(self, key: str, record: Record, *, patient: bool = True) -> bool:
        """Write a record; False if there is one."""
        return self._swap(key, 0, seal_record(self._secret, self.prefix + key, record), patient=patient)

    def replace(self, key: str, record: Record, may_replace: Callable[[dict[str, Any]], bool]) -> bool:
        """Write a record in place of one that may be replaced, or of none; False if that one may not."""
        sealed = seal_record(self._secret, self.prefix + key, record)
        while True:
            found = self._ask(lambda etcd: etcd.get(self.prefix + key))
            if found is not None:
                if found.value == sealed:
                    return True
                there = self._open(found)
                if there is None:
                    raise RecordsError(
                        f"the etcd key {self.prefix}{key} was not written by this run; if nothing else uses it: "
                        f"etcdctl del {self.prefix}{key}"
                    )
                if not may_replace(there):
                    return False
            if self._swap(key, 0 if found is None else found.mod_revision, sealed):
                return True

    def put(self, key: str, record: Record, *, patient: bool = True) -> None:
        """Write a record in place of any other."""
        sealed = seal_record(self._secret, self.prefix + key, record)
        self._under_lease(lambda etcd: etcd.put(self.prefix + key, sealed, self._lease.id), patient=patient)
        self._note(key, sealed)

    def speak(self, aloud: bool) -> None:
        """Tell about members of etcd that are lost, and keys that are dropped, or not; one agent of the run does."""
        self._client.quiet = not aloud
        self._aloud = aloud

    def begin(self, leads: Callable[[], bool]) -> None:
        """Leave what was written so far to others, and look after what is written from now on.

        Args:
            leads: asked before lost records are written again; False: somebody else leads, and does that.
        """
        with self._lock:
            self._written.clear()
        self._leads = leads

    def _swap(self, key: str, revision: int, sealed: bytes, *, patient: bool = True) -> bool:
        name = self.prefix + key

        def write(etcd: EtcdClient) -> TransactionResult:
            return etcd.transaction([Compare(name, revision)], [Put(name, sealed, self._lease.id)], [Get(name)])

        result = self._under_lease(write, patient=patient)
        # An attempt whose answer was lost may have been the one that wrote what is there.
        won = result.succeeded or any(found.value == sealed for found in result.responses[0])
        if won:
            self._note(key, sealed)
        else:
            for found in result.responses[0]:
                self._open(found, in_the_way=True)
        return won

    def _note(self, key: str, sealed: bytes) -> None:
        with self._lock:
            self._written[key] = sealed

    def _opened(self, found: Iterable[KeyValue]) -> dict[str, dict[str, Any]]:
        start = len(self.prefix)
        return {_name(kv)[start:]: record for kv in found if (record := self._open(kv)) is not None}

    def _open(self, found: KeyValue, *, in_the_way: bool = False) -> dict[str, Any] | None:
        key = _name(found)
        record = open_record(self._secret, key, found.value)
        told = key in self._foreign or len(self._foreign) == _FOREIGN_KEYS
        # All agents of the run see the same keys; the one that leads tells.
        if record is None and (self._aloud or in_the_way) and not told:
            self._foreign.add(key)
            more = "; more are dropped without a word" if len(self._foreign) == _FOREIGN_KEYS else ""
            logger.warning("dropped the etcd key %s: it was not written by this run%s", printable(key), more)
        return record

    def _under_lease(self, call: Callable[[EtcdClient], _T], *, patient: bool = True) -> _T:
        def attempt(etcd: EtcdClient) -> _T:
            try:
                return call(etcd)
            except EtcdLeaseLostError:
                self._lease.grant(etcd.limits)
                return call(etcd)

        return self._ask(attempt, patient=patient)

    def _ask(self, call: Callable[[EtcdClient], _T], *, patient: bool = True) -> _T:
        try:
            return call(self._limited(patient=patient))
        except EtcdInterruptedError as error:
            raise RecordsInterruptedError(str(error)) from error
        except EtcdUnavailableError as error:
            raise RecordsUnreachableError(str(error)) from error
        except EtcdError as error:
            raise RecordsError(str(error)) from error

    def _limited(self, *, patient: bool) -> EtcdClient:
        if not patient or self._hurried.is_set():
            return self._client.limited(min(self._limit, _HURRIED_SECONDS))
        if threading.current_thread() is threading.main_thread():
            return self._client.limited(self._limit, lambda: self._hurried.is_set() or self._interrupted())
        return self._client.limited(self._limit, lambda: self._hurried.is_set() or self._closed.is_set())

    def _look_after(self) -> None:
        """Notice that etcd is lost, and that it has lost records."""
        silence, renewed_at, looked_at = 0.0, self._lease.renewed_at, time.monotonic()
        while not self._closed.wait(self._interval):
            now = time.monotonic()
            if self._lease.renewed_at != renewed_at:
                silence, renewed_at = 0.0, self._lease.renewed_at
            else:
                # A process that was paused has not listened meanwhile.
                silence += min(now - looked_at, 2 * self._interval)
            looked_at = now
            if silence > self._limit:
                self._lost(RecordsUnreachableError(f"etcd at {self._client.config} is silent for {silence:.0f} s"))
                return
            if self._written and not silence:
                self._restore()

    def _restore(self) -> None:
        """Write again what this agent wrote and etcd has lost."""
        with self._lock:
            written = dict(self._written)
        try:
            present = self._ask(lambda etcd: etcd.get_present([self.prefix + key for key in written]))
            lost = [key for key in written if (self.prefix + key).encode() not in present]
            if lost and not self._leads():
                with self._lock:
                    self._written.clear()
                return
            for key in lost:
                self._swap(key, 0, written[key])
        except RecordsError as error:
            # The next look follows. That etcd is silent was told by the connection.
            known = isinstance(error, RecordsUnreachableError | RecordsInterruptedError) or self._closed.is_set()
            logger.log(logging.DEBUG if known else logging.WARNING, "%s", error)
        else:
            if lost:
                logger.warning("etcd had lost %d records of the run; they are written again", len(lost))
