"""The records of a run in etcd, with a copy in the run directory.

Under the run's prefix::

    done                               the run is finished; only if the run directory cannot be written
    round                              the newest round; earlier ones are not kept in etcd
    scopes/<incarnation>/epochs/000001 one per leader's term
    scopes/<incarnation>/endpoint      address and port of the leader

All keys are under one lease of the run, and etcd deletes them within a minute after its end. All agents keep the lease
alive, so that the end of one agent deletes no records. Each record has a copy in the run directory, which counts as
well: for later starts, for the commands of operators, and if etcd loses its own (it was cut off from every agent for
longer than the lease, or came back empty). Why the run failed is in the run directory alone.
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar
from urllib.parse import quote

from slurm_elastic import typed_json
from slurm_elastic.errors import RecordsError
from slurm_elastic.rendezvous.records import api
from slurm_elastic.rendezvous.records.etcd.client import EtcdClient, KeyValue, TransactionResult, get, put, unchanged
from slurm_elastic.rendezvous.records.etcd.config import EtcdConfig
from slurm_elastic.rendezvous.records.etcd.errors import EtcdError
from slurm_elastic.rundir import RunDir, is_signature, log_drop, signature

logger = logging.getLogger(__name__)

_DONE, _ROUND = "done", "round"

LEASE_SECONDS = 45
"""How long the keys outlive the last agent of the run; with the time that etcd adds, less than a minute."""

_START_SECONDS = 30.0
"""How long an agent that starts waits for an etcd that does not answer."""

_FRESH_SECONDS = 2.0
"""How long an agent that starts takes what it read at first for the newest records."""

_HURRIED_SECONDS = 2.0
"""How long the end of a run waits for one."""

_CONTEXT = b"slurm_elastic etcd record 1\0"
_DIGEST_BYTES = hashlib.sha256().digest_size
_LARGE = 1 << 16
"""Bytes of JSON from which on a value is compressed: etcd takes requests of 1.5 MiB at most (--max-request-bytes)."""

_T = TypeVar("_T")


class EtcdRecords:
    """Keeps the records of one incarnation in etcd; see :class:`~slurm_elastic.rendezvous.records.api.RunDirRecords`.

    Args:
        limit: Seconds that calls wait for an answer, and after which a silent etcd counts as lost.
        interrupted: Called every 0.1 s while the main thread waits; True ends that wait.

    Raises:
        UsageError: The endpoint is no etcd, or etcd refuses user, password or certificate, or the run's secret cannot
            be read.
        RecordsError: etcd does not answer, or is full.
    """

    def __init__(
        self,
        config: EtcdConfig,
        run_dir: RunDir,
        incarnation: str,
        limit: float,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> None:
        self.prefix = config.run_prefix(run_dir.run_id)
        self._secret, self._limit, self._interrupted = run_dir.secret(), limit, interrupted
        self._copy = api.RunDirRecords(run_dir, incarnation)
        self._own = f"scopes/{quote(incarnation, safe='')}/"
        self._epochs = f"{self._own}epochs/"
        self._endpoint = f"{self._own}endpoint"
        self._copy_failed = False
        self._opening: dict[tuple[str, ...], dict[str, dict[str, Any]]] = {}
        self._opening_ends = 0.0
        self._lost: Callable[[RecordsError], None] = lambda error: None
        self._ending = threading.Event()
        self.client = EtcdClient(config)
        # An agent asks for the lease when it writes; most agents never write, and only renew it.
        self._lease = self.client.shared_lease(self.prefix, int(min(LEASE_SECONDS, max(5.0, limit))), self._heard)
        try:
            self.enter(min(limit, _START_SECONDS))
        except BaseException:
            self.close()
            raise

    def enter(self, timeout: float) -> None:
        """Check that etcd can be used, and read by the same request all records that an agent needs when it starts."""
        etcd = self.client.limited(timeout, self._interrupted)
        pairs = etcd.connect(get(self.prefix, prefix=True))
        # From here on only the leader logs members of etcd that are lost or back, and keys of others.
        self.client.connection.quiet = True
        records = self._opened(pairs)
        # The answer to each question that an agent asks soon after, once. A leader may have come since then.
        self._opening = {
            keys: answer
            for keys in ((self._epochs,), (self._endpoint, _ROUND), (_DONE,))
            if (answer := {name: record for name, record in records.items() if name.startswith(keys)})
            or keys == (_DONE,)
        }
        self._opening_ends = time.monotonic() + _FRESH_SECONDS

    def newest_epoch(self, *, can_wait: bool = True) -> int | None:
        """See RunDirRecords."""
        copied = self._copied(self._copy.newest_epoch, None)
        try:
            # Without the copy only etcd has the answer, so this call waits for it all the same.
            hurried = not can_wait and copied is not None
            epochs = self._read(self._epochs, can_wait=not hurried)
        except api.RecordsUnreachableError:
            if not hurried:
                raise
            return copied
        return _newest([*(int(key.removeprefix(self._epochs)) for key in epochs), copied])

    def claim_epoch(self, number: int, record: api.Record) -> bool:
        """See RunDirRecords."""
        self._opening.clear()
        won = self._create(f"{self._epochs}{number:06d}", record)
        if won and self._copied(lambda: self._copy.claim_epoch(number, record), True):
            self.client.connection.quiet = False
            return True
        return False

    def publish_endpoint(self, record: api.Record) -> None:
        """See RunDirRecords."""
        name = self.prefix + self._endpoint
        signed = signed_value(self._secret, name, record)
        self._ask(lambda etcd: etcd.put(name, signed, self._lease.id))
        # For `slurm-elastic drain` and the like, which know the run directory only.
        self._copied(lambda: self._copy.publish_endpoint(record), None)

    def claim_round(self, number: int, record: api.Record) -> bool:
        """See RunDirRecords."""
        name = self.prefix + _ROUND
        signed = signed_value(self._secret, name, {"number": number, "record": record})
        while True:
            pair = self._ask(lambda etcd: etcd.get(name))
            there = None if pair is None else self._open(pair)
            if pair is not None and there is None:
                raise RecordsError(
                    f"the etcd key {name} was not written by this run; if nothing else uses it: etcdctl del {name}"
                )
            if there is not None and int(there["number"]) >= number:
                return False
            if self._swap(_ROUND, pair.mod_revision if pair else 0, signed):
                return self._copied(lambda: self._copy.claim_round(number, record), True)

    def last_round(self) -> int | None:
        """See RunDirRecords."""
        newest = self._read(_ROUND).get(_ROUND)
        return _newest([newest["number"] if newest else None, self._copied(self._copy.last_round, None)])

    def situation(self, known_round: int | None = None) -> api.Situation:
        """See RunDirRecords."""
        records = self._read(self._endpoint, _ROUND)
        newest = records.get(_ROUND)
        known = newest["number"] if newest else known_round
        copied = self._copied(lambda: self._copy.situation(known), api.Situation(None, None, None))
        number = _newest([newest["number"] if newest else None, copied.number])
        record = newest["record"] if newest and newest["number"] == number else copied.round
        # Other users of etcd can write over it, again and again; only agents of this run write the copy.
        endpoint = records.get(self._endpoint) or copied.endpoint
        return api.Situation(endpoint, number, None if number == known_round else record)

    def mark_done(self, record: api.Record) -> bool:
        """See RunDirRecords. The copy is enough, so the end of a run does not wait for etcd."""
        try:
            return self._copy.mark_done(record)
        except RecordsError as error:
            self._log_failure(error)
            return self._create(_DONE, record)

    def is_done(self) -> bool:
        """See RunDirRecords."""
        return self._copied(self._copy.is_done, False) or bool(self._read(_DONE))

    def publish_failure(self, record: api.Record) -> None:
        """See RunDirRecords."""
        self._copied(lambda: self._copy.publish_failure(record), None)

    def failure(self) -> api.Record | None:
        """See RunDirRecords."""
        return self._copied(self._copy.failure, None)

    def on_loss(self, report: Callable[[RecordsError], None]) -> None:
        """See RunDirRecords."""
        self._lost = report

    def stop_waiting(self) -> None:
        """See RunDirRecords."""
        self._ending.set()

    def close(self) -> None:
        """See RunDirRecords. The lease expires unless other agents renew it."""
        self.client.close()

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

    def _read(self, *keys: str, can_wait: bool = True) -> dict[str, dict[str, Any]]:
        """Return the records that exist, by key, all as of one moment; once what an agent that starts has read of them.

        Args:
            keys: The keys without prefix; one with a slash at its end stands for all keys that begin with it.
            can_wait: False to wait for etcd 2 s at most.
        """
        opening = self._opening.pop(keys, None)
        if opening is not None and time.monotonic() < self._opening_ends:
            return opening
        reads = [get(self.prefix + key, prefix=key.endswith("/")) for key in keys]
        responses = self._ask(lambda etcd: etcd.transaction((), reads), can_wait=can_wait).responses
        return self._opened(kv for response in responses for kv in response)

    def _create(self, key: str, record: api.Record) -> bool:
        """Write a record; return False if there is one."""
        return self._swap(key, 0, signed_value(self._secret, self.prefix + key, record))

    def _swap(self, key: str, revision: int, signed: bytes) -> bool:
        name = self.prefix + key

        def write(etcd: EtcdClient) -> TransactionResult:
            return etcd.transaction([unchanged(name, revision)], [put(name, signed, self._lease.id)], [get(name)])

        result = self._ask(write)
        # An attempt whose answer was lost may have been the one that wrote what is there.
        won = result.succeeded or any(pair.value == signed for pair in result.responses[0])
        if not won:
            for pair in result.responses[0]:
                self._open(pair, in_the_way=True)
        return won

    def _opened(self, pairs: Iterable[KeyValue]) -> dict[str, dict[str, Any]]:
        start = len(self.prefix)
        return {_name(kv)[start:]: record for kv in pairs if (record := self._open(kv)) is not None}

    def _open(self, pair: KeyValue, *, in_the_way: bool = False) -> dict[str, Any] | None:
        key = _name(pair)
        record = verified(self._secret, key, pair.value)
        if record is None and (in_the_way or not self.client.connection.quiet):
            log_drop(f"the etcd key {key}", "no signature of this run")
        return record

    def _ask(self, call: Callable[[EtcdClient], _T], *, can_wait: bool = True) -> _T:
        is_main = threading.current_thread() is threading.main_thread()
        if can_wait and not self._ending.is_set():
            etcd = self.client.limited(self._limit, lambda: self._ending.is_set() or (is_main and self._interrupted()))
        else:
            etcd = self.client.limited(min(self._limit, _HURRIED_SECONDS))
        try:
            return call(etcd)
        except RecordsError:
            raise
        except EtcdError as error:
            raise RecordsError(str(error)) from error

    def _heard(self, silence: float) -> None:
        """Report once an etcd that is lost."""
        if silence > self._limit:
            report, self._lost = self._lost, lambda error: None
            report(api.RecordsUnreachableError(f"etcd at {self.client.config} is silent for {silence:.0f} s"))


def _newest(numbers: list[int | None]) -> int | None:
    return max((number for number in numbers if number is not None), default=None)


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


def verified(secret: bytes, key: str, value: bytes) -> dict[str, Any] | None:
    """Return the record that is the value of a key; None if it was signed with another secret or for another key."""
    digest, content = value[:_DIGEST_BYTES], value[_DIGEST_BYTES:]
    if not is_signature(digest, secret, _CONTEXT, key, content):
        return None
    # JSON begins with a brace, what was compressed does not (RFC 1950).
    plain = content if content.startswith(b"{") else zlib.decompress(content)
    record: dict[str, Any] = typed_json.loads(plain)["record"]
    return record
