"""The client: keys, transactions, shared leases and waits of etcd v3, through the loss of single members."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import logging
import random
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from slurm_elastic.rendezvous.records.etcd.config import EtcdConfig
from slurm_elastic.rendezvous.records.etcd.errors import (
    EtcdError,
    EtcdLeaseExistsError,
    EtcdLeaseLostError,
    EtcdUnavailableError,
)
from slurm_elastic.rendezvous.records.etcd.failover_channel import Connection, Limits, load_rpc

logger = logging.getLogger(__name__)

MAX_OPERATIONS = 128
"""Operations that etcd takes in one transaction (its --max-txn-ops, by default)."""


class KeyValue(Protocol):
    """A key as etcd holds it, etcd's message of this name.

    Attributes:
        key: The whole key, with all prefixes.
        mod_revision: The revision at which it was last written.
    """

    key: bytes
    value: bytes
    mod_revision: int


@dataclass(frozen=True, slots=True)
class TransactionResult:
    """The result of a transaction.

    Attributes:
        succeeded: Whether all comparisons held.
        responses: For each operation of the branch taken: the keys that a read found, () for the others.
    """

    succeeded: bool
    responses: Sequence[Sequence[KeyValue]]
    revision: int


def unchanged(key: bytes | str, mod_revision: int) -> object:
    """Compare: the key was last written at this revision; 0: there is no such key."""
    etcd = load_rpc().etcd
    return etcd.Compare(
        key=to_bytes(key), target=etcd.Compare.MOD, result=etcd.Compare.EQUAL, mod_revision=mod_revision
    )


def put(key: bytes | str, value: bytes, lease: int = 0) -> object:
    """Write a key, under a lease unless that is 0."""
    etcd = load_rpc().etcd
    return etcd.RequestOp(request_put=etcd.PutRequest(key=to_bytes(key), value=value, lease=lease))


def get(key: bytes | str, prefix: bool = False) -> object:
    """Read a key, or all keys that start with it."""
    etcd = load_rpc().etcd
    return etcd.RequestOp(request_range=etcd.RangeRequest(**key_range(key, prefix)))


def to_bytes(text: bytes | str) -> bytes:
    """Return a key or a value as etcd knows it.

    Raises:
        TypeError: It is neither text nor bytes.
    """
    if isinstance(text, str):
        return text.encode()
    if isinstance(text, bytes | bytearray | memoryview):
        return bytes(text)
    raise TypeError(f"keys and values of a store are str or bytes, not {type(text).__name__}")


def key_range(key: bytes | str, prefix: bool) -> dict[str, bytes]:
    """Return the fields of a message that name a key, or all keys with a prefix, whose last byte must not be 0xff."""
    start = to_bytes(key)
    return {"key": start, "range_end": start[:-1] + bytes([start[-1] + 1])} if prefix else {"key": start}


def shared_lease_id(name: str | bytes) -> int:
    """Return the lease id that all processes derive from a name, a positive int64."""
    digest = hashlib.sha256(to_bytes(name)).digest()
    return int.from_bytes(digest[:8], "big") % (2**63 - 1) + 1


class Lease:
    """A lease that a thread renews about three times in its ttl, together with all others who use the same name.

    Attributes:
        id: etcd's number for it.
        ttl: Seconds that it lives on after the last renewal; etcd gives all leases their whole time again after it
            elected a leader.
    """

    def __init__(
        self, connection: Connection, ttl: int, name: str, heard: Callable[[float], None] | None, limits: Limits
    ) -> None:
        """Have etcd make the lease, and start to renew it; see :meth:`EtcdClient.shared_lease`."""
        self._connection = connection
        self._closed = threading.Event()
        self.ttl = ttl
        self.id = shared_lease_id(name)
        self._heard = heard or (lambda silence: None)
        if heard is None:
            self.grant(limits)
        self._thread = threading.Thread(target=self._keep_alive, name="etcd-keep-alive", daemon=True)
        self._thread.start()

    def grant(self, limits: Limits) -> None:
        """Have etcd make the lease, unless it is there already.

        Raises:
            EtcdError: See :meth:`Connection.call`.
        """
        request = load_rpc().etcd.LeaseGrantRequest(TTL=self.ttl, ID=self.id)
        with contextlib.suppress(EtcdLeaseExistsError):
            self.ttl = self._connection.call("Lease/LeaseGrant", request, limits).TTL

    def close(self) -> None:
        """End the thread; its call ends with the connection, which is closed first."""
        self._closed.set()
        self._thread.join()

    def _keep_alive(self) -> None:
        limits = Limits(timeout=max(1.0, self.ttl / 3))
        request = load_rpc().etcd.LeaseKeepAliveRequest(ID=self.id)
        silence = 0.0
        # Without an answer there is no wait: the connection pauses between its attempts.
        while not self._closed.wait(wait := 0.0 if silence else self.ttl / 3 * random.uniform(0.8, 1.0)):
            try:
                if self._connection.call("Lease/LeaseKeepAlive", request, limits).TTL <= 0:
                    # It has expired, and its keys with it.
                    self.grant(limits)
                silence = 0.0
            except EtcdUnavailableError:
                # The sum counts no time in which this process was stopped: then it has received nothing.
                silence += wait + limits.timeout
            except EtcdError as error:
                if not self._connection.is_closed():
                    logger.warning("cannot renew the etcd lease %x: %s", self.id, error)
                continue
            self._heard(silence)


class EtcdClient:
    """A connection to etcd for one process; safe to use from several threads, not after a fork.

    Each call goes to one member and, when that is lost, to the next, until one answers or the time is up. A write
    whose answer was lost with its member is sent again: a put or a delete does the same thing twice; the caller of a
    transaction recognizes what it has written. Keys are given whole, as bytes or str.

    Every call may raise:
        EtcdUnavailableError: No member answered in time.
        RecordsInterruptedError: The interrupt hook said so.
        EtcdEndpointError, EtcdAuthenticationError, EtcdPermissionError: A person's mistake.
        EtcdNoSpaceError: The database is full.

    Attributes:
        limits: How long each call may take, 10 s in all unless :meth:`limited` says otherwise.
        held: Objects to be kept in memory until the client is closed.

    Raises:
        UsageError: etcd3 cannot be used in this process.
    """

    def __init__(self, config: EtcdConfig) -> None:
        self._etcd = load_rpc().etcd
        self.config = config
        self.limits = Limits(timeout=10.0)
        self.connection = Connection(config)
        self._leases: dict[str, Lease] = {}
        self.held: list[object] = []

    def __enter__(self) -> EtcdClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def limited(self, timeout: float, interrupted: Callable[[], bool] | None = None) -> EtcdClient:
        """Return this client with other limits; both share everything else, and one close closes both.

        Args:
            timeout: Seconds.
            interrupted: Called every 0.1 s during each call; True ends it with RecordsInterruptedError.
        """
        view = copy.copy(self)
        view.limits = Limits(timeout, interrupted)
        return view

    def connect(self, read: object = None) -> Sequence[KeyValue]:
        """See that etcd is there, lets us in, and allows keys under this configuration's prefix to be read and written.

        Args:
            read: A read to be done by the way, so that a thousand processes that start have one question each; by
                default that of the prefix itself.

        Nothing is written: etcd checks the permissions of both branches of a transaction, and whether there is
        space, before it compares (etcd 3.4, etcdserver/apply_auth.go and apply.go).
        """
        key = self.config.prefix
        return self.transaction([unchanged(key, 2**62)], [put(key, b"")], [read or get(key)]).responses[0]

    def get(self, key: bytes | str) -> KeyValue | None:
        """Return a key, or None if there is none."""
        pairs: Sequence[KeyValue] = self._call("Range", self._etcd.RangeRequest(**key_range(key, False))).kvs
        return pairs[0] if pairs else None

    def get_prefix(self, prefix: bytes | str) -> tuple[Sequence[KeyValue], int]:
        """Return all keys with a prefix, in order, and the revision of the store that this is."""
        response = self._call("Range", self._etcd.RangeRequest(**key_range(prefix, True)))
        return response.kvs, int(response.header.revision)

    def count_prefix(self, prefix: bytes | str) -> int:
        """Return how many keys have a prefix."""
        return int(self._call("Range", self._etcd.RangeRequest(**key_range(prefix, True), count_only=True)).count)

    def get_present(self, keys: Iterable[bytes | str]) -> tuple[dict[bytes, bytes], int]:
        """Return what those of the keys hold that are there, and a revision of the store at which they were read."""
        reads = [get(key) for key in keys]
        present: dict[bytes, bytes] = {}
        revision = 0
        for start in range(0, len(reads), MAX_OPERATIONS):
            result = self.transaction((), reads[start : start + MAX_OPERATIONS])
            present.update((pair.key, pair.value) for response in result.responses for pair in response)
            revision = revision or result.revision
        return present, revision

    def put(self, key: bytes | str, value: bytes, lease: int = 0) -> int:
        """Write a key, under a lease unless that is 0; return the revision."""
        return self.transaction((), [put(key, value, lease)]).revision

    def delete(self, key: bytes | str, *, prefix: bool = False) -> int:
        """Delete a key, or all that start with it; return how many there were."""
        return int(self._call("DeleteRange", self._etcd.DeleteRangeRequest(**key_range(key, prefix))).deleted)

    def transaction(
        self, compare: Iterable[object], success: Iterable[object] = (), failure: Iterable[object] = ()
    ) -> TransactionResult:
        """Do all of ``success`` at once if all comparisons hold, else all of ``failure``.

        If a lease of this client ran out, say because the process was stopped for a while, it is granted anew first.
        """
        request = self._etcd.TxnRequest(compare=compare, success=success, failure=failure)
        try:
            response = self.connection.call("KV/Txn", request, self.limits)
        except EtcdLeaseLostError:
            for lease in tuple(self._leases.values()):
                lease.grant(self.limits)
            response = self.connection.call("KV/Txn", request, self.limits)
        reads = [part.response_range.kvs for part in response.responses]
        return TransactionResult(response.succeeded, reads, response.header.revision)

    def shared_lease(self, name: str, ttl: int, heard: Callable[[float], None] | None = None) -> Lease:
        """Keep a lease alive together with all others who use the same name.

        What lives under it is gone ``ttl`` seconds after the last of them has ended. If it is lost all the same,
        it is made again, empty.

        Args:
            heard: Called by a thread after each renewal, with 0; after one without an answer, with the seconds for
                which this process has asked in vain. With it, the lease is granted by the first renewal or write, so
                that a client that never writes has nothing to ask first.
        """
        if name not in self._leases:
            self._leases[name] = Lease(self.connection, ttl, name, heard, self.limits)
        return self._leases[name]

    def await_put(self, key: bytes, revision: int, deadline: float) -> None:
        """Wait by a watch until a key was written after a revision; a broken watch ends the wait early.

        The caller reads again in both cases.

        Args:
            revision: The revision at which the caller has read it.
            deadline: On the monotonic clock.
        """
        create = self._etcd.WatchCreateRequest
        request = create(key=key, start_revision=revision + 1, filters=[create.NODELETE])
        self.connection.watch(self._etcd.WatchRequest(create_request=request), deadline)

    def close(self) -> None:
        """End all threads and the connection. Leases are left to run out."""
        self.connection.close()
        for lease in self._leases.values():
            lease.close()
        self.held.clear()

    def _call(self, method: str, request: Any) -> Any:
        return self.connection.call(f"KV/{method}", request, self.limits)
