"""Signed records under keys of etcd that live as long as any agent of the run, and are made again if they vanish."""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
import threading
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from slurm_elastic import typed_json
from slurm_elastic.rendezvous.records.api import (
    Record,
    RecordsError,
    RecordsInterruptedError,
    RecordsUnreachableError,
)
from slurm_elastic.rendezvous.records.etcd.client import EtcdClient
from slurm_elastic.rendezvous.records.etcd.errors import EtcdError
from slurm_elastic.rendezvous.records.etcd.transactions import KeyValue, TransactionResult, get, put, unchanged
from slurm_elastic.rundir import is_signature, signature
from slurm_elastic.text import printable

logger = logging.getLogger(__name__)

LEASE_SECONDS = 45
"""How long the keys outlive the last agent of the run; with the time that etcd adds, less than a minute."""

_HURRIED_SECONDS = 2.0

_CONTEXT = b"slurm_elastic etcd record 1\0"
_DIGEST_BYTES = hashlib.sha256().digest_size
_LARGE = 1 << 16
"""Bytes of JSON from which on a value is compressed: etcd takes requests of 1.5 MiB at most (--max-request-bytes)."""

_T = TypeVar("_T")


_FOREIGN_KEYS = 16
"""Keys of other programs that the log names."""


def _name(pair: KeyValue) -> str:
    """Return a key as text; bytes that are no UTF-8, which this project never writes, as escape sequences."""
    return pair.key.decode(errors="backslashreplace")


def signed_value(secret: bytes, key: str, record: Mapping[str, Any]) -> bytes:
    """Return a record as the value of a key.

    It has a random number, so that a writer whose answer was lost recognizes its own value.
    """
    content = json.dumps({"record": record, "nonce": secrets.token_hex(8)}).encode()
    if len(content) >= _LARGE:
        # A level that takes as long as the JSON itself; higher ones save little.
        content = zlib.compress(content, 3)
    return signature(secret, _CONTEXT, key, content) + content


def _verified(secret: bytes, key: str, value: bytes) -> dict[str, Any] | None:
    """Return the record that is the value of a key; None if it was signed with another secret or for another key."""
    digest, content = value[:_DIGEST_BYTES], value[_DIGEST_BYTES:]
    if not is_signature(digest, secret, _CONTEXT, key, content):
        return None
    # JSON begins with a brace, what was compressed does not (RFC 1950).
    plain = content if content.startswith(b"{") else zlib.decompress(content)
    record: dict[str, Any] = typed_json.loads(plain)["record"]
    return record


class LeasedRecords:
    """One agent's access to the records of its run in etcd.

    All agents keep one lease alive, so that the end of one agent deletes no records. If etcd loses them all the same
    (it was cut off from every agent for longer than the lease, or came back empty), the agent that wrote them writes
    them again.

    Args:
        client: A client of etcd.
        prefix: Prefix of the run's keys, with a slash at its end.
        secret: The run's secret.
        limit: Seconds that calls wait for an answer, and after which a silent etcd counts as lost.
        interrupted: Called every 0.1 s while the main thread waits; True ends that wait.

    Attributes:
        client: The client.
        written: Signed records of this agent, by key, that it writes again if etcd loses them.
        leads: Called before they are written again; False if another agent leads, which restores its own.
        logs: Whether dropped keys are logged; one agent of the run does so.
    """

    def __init__(
        self, client: EtcdClient, prefix: str, secret: bytes, limit: float, interrupted: Callable[[], bool]
    ) -> None:
        self.prefix = prefix
        self.client, self._secret, self._limit, self._interrupted = client, secret, limit, interrupted
        self._ending = threading.Event()
        self.written: dict[str, bytes] = {}
        self._foreign: set[str] = set()
        self.logs = False
        self._lost: Callable[[RecordsError], None] = lambda error: None
        self.leads: Callable[[], bool] = lambda: True
        # An agent asks for the lease when it writes; most agents never write, and only renew it.
        self._lease = client.shared_lease(prefix, int(min(LEASE_SECONDS, max(5.0, limit))), self._heard)

    def on_loss(self, report: Callable[[RecordsError], None]) -> None:
        """See :class:`~slurm_elastic.rendezvous.records.api.Records`."""
        self._lost = report

    def stop_waiting(self) -> None:
        """See :class:`~slurm_elastic.rendezvous.records.api.Records`."""
        self._ending.set()

    def close(self) -> None:
        """End all threads and the connection. The lease expires unless other agents renew it."""
        self.client.close()

    def connect(self, timeout: float) -> dict[str, dict[str, Any]]:
        """Check that etcd can be used, and return all records of the run, by one request.

        Args:
            timeout: Seconds to wait for an etcd that does not answer.

        Raises:
            EtcdError: etcd cannot be used; the subclass says why.
        """
        etcd = self.client.limited(timeout, self._interrupted)
        return self._opened(etcd.connect(get(self.prefix, prefix=True)))

    def read(self, *keys: str, can_wait: bool = True) -> dict[str, dict[str, Any]]:
        """Return the records that exist, by key, all as of one moment.

        Args:
            keys: The keys without prefix; one with a slash at its end stands for all keys that begin with it.
            can_wait: False to wait for etcd 2 s at most.
        """
        reads = [get(self.prefix + key, prefix=key.endswith("/")) for key in keys]
        responses = self._ask(lambda etcd: etcd.transaction((), reads), can_wait=can_wait).responses
        return self._opened(kv for response in responses for kv in response)

    def create(self, key: str, record: Record, *, can_wait: bool = True) -> bool:
        """Write a record; return False if there is one."""
        return self._swap(key, 0, signed_value(self._secret, self.prefix + key, record), can_wait=can_wait)

    def replace(self, key: str, record: Record, may_replace: Callable[[dict[str, Any]], bool]) -> bool:
        """Write a record in place of one that `may_replace` accepts, or of none; return False if it refuses."""
        signed = signed_value(self._secret, self.prefix + key, record)
        while True:
            pair = self._ask(lambda etcd: etcd.get(self.prefix + key))
            if pair is not None:
                if pair.value == signed:
                    return True
                there = self._open(pair)
                if there is None:
                    raise RecordsError(
                        f"the etcd key {self.prefix}{key} was not written by this run; if nothing else uses it: "
                        f"etcdctl del {self.prefix}{key}"
                    )
                if not may_replace(there):
                    return False
            if self._swap(key, 0 if pair is None else pair.mod_revision, signed):
                return True

    def put(self, key: str, record: Record, *, can_wait: bool = True) -> None:
        """Write a record in place of any other."""
        signed = signed_value(self._secret, self.prefix + key, record)
        self._ask(lambda etcd: etcd.put(self.prefix + key, signed, self._lease.id), can_wait=can_wait)
        self.written[key] = signed

    def _swap(self, key: str, revision: int, signed: bytes, *, can_wait: bool = True) -> bool:
        name = self.prefix + key

        def write(etcd: EtcdClient) -> TransactionResult:
            return etcd.transaction([unchanged(name, revision)], [put(name, signed, self._lease.id)], [get(name)])

        result = self._ask(write, can_wait=can_wait)
        # An attempt whose answer was lost may have been the one that wrote what is there.
        won = result.succeeded or any(pair.value == signed for pair in result.responses[0])
        if won:
            self.written[key] = signed
        else:
            for pair in result.responses[0]:
                self._open(pair, in_the_way=True)
        return won

    def _opened(self, pairs: Iterable[KeyValue]) -> dict[str, dict[str, Any]]:
        start = len(self.prefix)
        return {_name(kv)[start:]: record for kv in pairs if (record := self._open(kv)) is not None}

    def _open(self, pair: KeyValue, *, in_the_way: bool = False) -> dict[str, Any] | None:
        key = _name(pair)
        record = _verified(self._secret, key, pair.value)
        is_logged = key in self._foreign or len(self._foreign) == _FOREIGN_KEYS
        # All agents of the run read the same keys; the leader logs them.
        if record is None and (self.logs or in_the_way) and not is_logged:
            self._foreign.add(key)
            more = "; more are dropped without a word" if len(self._foreign) == _FOREIGN_KEYS else ""
            logger.warning("dropped the etcd key %s: it was not written by this run%s", printable(key), more)
        return record

    def _ask(self, call: Callable[[EtcdClient], _T], *, can_wait: bool = True) -> _T:
        etcd = self._limited(can_wait=can_wait)
        try:
            return self._lease.under(lambda: call(etcd), etcd.limits)
        except RecordsError:
            raise
        except EtcdError as error:
            raise RecordsError(str(error)) from error

    def _limited(self, *, can_wait: bool) -> EtcdClient:
        if not can_wait or self._ending.is_set():
            return self.client.limited(min(self._limit, _HURRIED_SECONDS))
        if threading.current_thread() is threading.main_thread():
            return self.client.limited(self._limit, lambda: self._ending.is_set() or self._interrupted())
        return self.client.limited(self._limit, self._ending.is_set)

    def _heard(self, silence: float) -> None:
        """Report an etcd that is lost, and restore records that it has lost."""
        if silence > self._limit:
            self._lose(RecordsUnreachableError(f"etcd at {self.client.config} is silent for {silence:.0f} s"))
        elif self.written and not silence:
            try:
                self._restore()
            except RecordsUnreachableError as error:
                if not self._ending.is_set():
                    self._lose(error)
            except RecordsError as error:
                if not (isinstance(error, RecordsInterruptedError) or self.client.connection.is_closed()):
                    # The next renewal tries again.
                    logger.warning("%s", error)

    def _lose(self, error: RecordsError) -> None:
        report, self._lost = self._lost, lambda error: None
        report(error)

    def _restore(self) -> None:
        """Write again what this agent wrote and etcd has lost."""
        written = dict(self.written)
        present, _ = self._ask(lambda etcd: etcd.get_present([self.prefix + key for key in written]))
        lost = [key for key in written if (self.prefix + key).encode() not in present]
        if lost and not self.leads():
            self.written.clear()
        elif lost:
            for key in lost:
                self._swap(key, 0, written[key])
            logger.warning("etcd had lost %d records of the run; they are written again", len(lost))
