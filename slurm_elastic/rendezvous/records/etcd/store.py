"""EtcdStore: a torch Store whose keys are in etcd v3."""

from __future__ import annotations

import operator
import random
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

from torch._C._distributed_c10d import Store
from torch.distributed import DistNetworkError, DistStoreError, QueueEmptyError

from slurm_elastic.rendezvous.records.etcd.client import EtcdClient, Lease
from slurm_elastic.rendezvous.records.etcd.errors import EtcdError, EtcdUnavailableError
from slurm_elastic.rendezvous.records.etcd.transactions import (
    MAX_OPERATIONS,
    KeyValue,
    TransactionResult,
    delete,
    get,
    put,
    unchanged,
)

LEASE_SECONDS = 45
"""How long a store's keys outlive the last process that has it open; with what etcd adds, less than a minute."""

_DEFAULT_TIMEOUT = timedelta(seconds=300)  # torch 2.13, csrc/distributed/c10d/Store.hpp, kDefaultTimeout
_CONTENTION_SECONDS = 0.02
_RECEIPTS = MAX_OPERATIONS // 2
"""Receipts that one transaction deletes, of those that threads have left meanwhile."""

_T = TypeVar("_T")


class EtcdStore(Store):
    """A store that outlives every process that uses it, as long as one of them is left.

    It means by each method what torch's TCPStore means, and raises what that raises: DistStoreError when a wait is
    over, DistNetworkError when no etcd member answers. Waits are watches; nothing is polled. Keys and values may be
    any bytes. Unlike TCPStore, one store may be used by several threads at a time.

    A value may be as large as etcd takes a request, 1.5 MiB by default. The parameters have the names of torch's
    EtcdStore (torch 2.13, distributed/elastic/rendezvous/etcd_store.py).

    Args:
        etcd_client: The connection to etcd, which may be shared with others. The store lives until it is closed.
        etcd_store_prefix: All keys of the store lie under it. Stores with the same prefix are the same store.
        timeout: How long waits, and calls while no member answers, may take; None for 300 s.

    Attributes:
        client: The connection to etcd.
        prefix: The prefix, with a slash at its end.
        lease: Of the keys, shared by all processes that have the store open.

    Raises:
        EtcdError: etcd could not be reached, or refused; the subclass says which.
    """

    def __init__(self, etcd_client: EtcdClient, etcd_store_prefix: str, timeout: timedelta | None = None) -> None:
        super().__init__()
        self.set_timeout(_DEFAULT_TIMEOUT if timeout is None else timeout)
        self.client = etcd_client
        self.prefix = etcd_store_prefix if etcd_store_prefix.endswith("/") else f"{etcd_store_prefix}/"
        self._keys = f"{self.prefix}keys/".encode()
        self._lock = threading.Lock()
        self._used: list[bytes] = []
        """Receipts of transactions whose answer is known, which the next transaction deletes."""
        self.lease: Lease = etcd_client.shared_lease(self.prefix, LEASE_SECONDS)
        # torch's C++ side keeps the C++ half of a store only (torch 2.13: neither PrefixStore nor a process group
        # keeps the Python object), and without its Python half a store can do nothing.
        etcd_client.hold(self)

    def set(self, key: str | bytes, value: str | bytes) -> None:
        """Write a key."""
        self._transact([], [put(self._key(key), _bytes(value), self.lease.id)])

    def get(self, key: str | bytes) -> bytes:
        """Return what a key holds, after waiting for it if need be."""
        return self._wait([key], self._timeout)[0]

    def add(self, key: str | bytes, amount: int) -> int:
        """Add to the decimal number that a key holds, 0 if there is none, and return the sum.

        Raises:
            TypeError: The amount is no integer; nothing is written.
            ValueError: The key holds something else.
        """
        amount = operator.index(amount)

        def raised(pair: KeyValue | None) -> bytes:
            return str((0 if pair is None else int(pair.value)) + amount).encode()

        return int(self._update(key, raised))

    def append(self, key: str | bytes, value: str | bytes) -> None:
        """Write a value behind what a key holds."""
        self._update(key, lambda pair: (b"" if pair is None else pair.value) + _bytes(value))

    def compare_set(self, key: str | bytes, expected: str | bytes, desired: str | bytes) -> bytes:
        """Write a key if it holds what is expected, or if there is none and nothing is expected.

        Returns:
            What the key holds now; what was expected when there is no such key (as TCPStore does).
        """
        whole, before, after = self._key(key), _bytes(expected), _bytes(desired)
        while True:
            pair = self._call(lambda client: client.get(whole))
            if pair is None and before:
                return before
            if pair is not None and pair.value != before:
                return pair.value
            compare = unchanged(whole, pair.mod_revision if pair else 0)
            if self._transact([compare], [put(whole, after, self.lease.id)]).succeeded:
                return after

    def check(self, keys: Sequence[str | bytes]) -> bool:
        """Return whether all keys are there; a queue that holds something is."""
        there, _ = self._read(keys)
        return all(self._key(key) in there or self.queue_len(key) for key in keys)

    def wait(self, keys: Sequence[str | bytes], timeout: timedelta | None = None) -> None:
        """Wait until all keys are there; a queue that holds something is."""
        timeout = self._timeout if timeout is None else timeout
        deadline, missing = time.monotonic() + timeout.total_seconds(), list(dict.fromkeys(keys))
        while True:
            there, revision = self._read(missing)
            missing = [key for key in missing if self._key(key) not in there and not self.queue_len(key)]
            if not missing:
                return
            if time.monotonic() >= deadline:
                raise self._wait_timeout(keys, timeout)
            places = [place for key in missing for place in (self._key(key), self._queue(key))]
            self._await_put(places, revision, deadline)

    def multi_get(self, keys: Sequence[str | bytes]) -> list[bytes]:
        """Return what several keys hold, after waiting for them if need be."""
        return self._wait(keys, self._timeout)

    def multi_set(self, keys: Sequence[str | bytes], values: Sequence[str | bytes]) -> None:
        """Write several keys, up to 128 of them at once."""
        # A transaction may not write a key twice; the last one counts, as if they were written in order.
        values_by_key = {self._key(key): _bytes(value) for key, value in zip(keys, values, strict=True)}
        puts = [put(key, value, self.lease.id) for key, value in values_by_key.items()]
        for start in range(0, len(puts), MAX_OPERATIONS):
            self._transact([], puts[start : start + MAX_OPERATIONS])

    def delete_key(self, key: str | bytes) -> bool:
        """Delete a key; return whether there was one."""
        return bool(self._call(lambda client: client.delete(self._key(key))))

    def num_keys(self) -> int:
        """Return how many keys the store has."""
        return self._call(lambda client: client.count_prefix(self._keys))

    def list_keys(self) -> list[str]:
        """Return the names of all keys."""
        pairs, _ = self._call(lambda client: client.get_prefix(self._keys))
        return [pair.key[len(self._keys) :].decode(errors="backslashreplace") for pair in pairs]

    def queue_push(self, key: str | bytes, value: str | bytes) -> None:
        """Put a value at the end of a queue. Queues and keys have names of their own, but for `check`."""
        self._once([], [put(self._queue(key) + uuid.uuid4().hex.encode(), _bytes(value), self.lease.id)])

    def queue_pop(self, key: str | bytes, block: bool = True) -> bytes:
        """Take the first value out of a queue, after waiting for it if need be.

        Raises:
            QueueEmptyError: There is none, and `block` is False.
        """
        deadline = time.monotonic() + self._timeout.total_seconds()
        queue = self._queue(key)
        while True:
            pairs, revision = self._call(lambda client: client.get_prefix(queue))
            for value in sorted(pairs, key=lambda value: value.create_revision):
                if self._once([unchanged(value.key, value.mod_revision)], [delete(value.key)])[0]:
                    return value.value
            if pairs:
                continue  # Others took all of them.
            if not block:
                raise QueueEmptyError("queue is empty")
            if time.monotonic() >= deadline:
                raise self._wait_timeout([key], self._timeout)
            self._await_put([queue], revision, deadline)

    def queue_len(self, key: str | bytes) -> int:
        """Return how many values a queue holds."""
        return self._call(lambda client: client.count_prefix(self._queue(key)))

    def has_extended_api(self) -> bool:
        """Return True: there are append, multi_get and multi_set."""
        return True

    def clone(self) -> EtcdStore:
        """Return another object for the same store."""
        return EtcdStore(self.client, self.prefix, self._timeout)

    # The C++ side calls these two by their C++ names (torch 2.13, PythonStore in csrc/distributed/c10d/init.cpp).
    deleteKey = delete_key  # noqa: N815
    getNumKeys = num_keys  # noqa: N815

    @property
    def _timeout(self) -> timedelta:
        timeout: timedelta = self.timeout  # type: ignore[attr-defined]  # torch's stub leaves it out
        return timeout

    def _key(self, key: str | bytes) -> bytes:
        return self._keys + _bytes(key)

    def _read(self, keys: Sequence[str | bytes]) -> tuple[dict[bytes, bytes], int]:
        return self._call(lambda client: client.get_present(self._key(key) for key in keys))

    def _wait(self, keys: Sequence[str | bytes], timeout: timedelta) -> list[bytes]:
        names = [self._key(key) for key in keys]
        try:
            values = self._call(lambda client: client.wait_for(names), timeout)
        except TimeoutError:
            raise self._wait_timeout(keys, timeout) from None
        return [values[key] for key in names]

    def _wait_timeout(self, keys: Sequence[str | bytes], timeout: timedelta) -> DistStoreError:
        # The words are TCPStore's.
        milliseconds = round(timeout.total_seconds() * 1000)
        names = ", ".join("/" + _bytes(key).decode(errors="replace") for key in keys)
        return DistStoreError(f"wait timeout after {milliseconds}ms, keys: {names}")

    def _queue(self, key: str | bytes) -> bytes:
        # In hexadecimal, so that the name of no queue is the beginning of another's.
        return f"{self.prefix}queues/{_bytes(key).hex()}/".encode()

    def _await_put(self, prefixes: Sequence[bytes], revision: int, deadline: float) -> None:
        self._call(lambda client: client.await_puts(prefixes, revision, deadline, prefix=True))

    def _update(self, key: str | bytes, change: Callable[[KeyValue | None], bytes]) -> bytes:
        """Replace what a key holds by what ``change`` makes of it, exactly once."""
        whole = self._key(key)
        pair = self._call(lambda client: client.get(whole))
        contentions = 0
        while True:
            value = change(pair)
            compare = unchanged(whole, pair.mod_revision if pair else 0)
            done, (pairs, *_) = self._once([compare], [put(whole, value, self.lease.id)], get(whole))
            if done:
                return value
            pair = pairs[0] if pairs else None
            contentions += 1
            time.sleep(random.uniform(0, _CONTENTION_SECONDS * min(contentions, 10)))

    def _once(
        self, compare: Sequence[object], write: Sequence[object], *read: object
    ) -> tuple[bool, Sequence[Sequence[KeyValue]]]:
        """Write if the comparisons hold, and read if not, where doing it twice is not the same as once.

        A transaction whose answer was lost with its member may have been carried out. So it also leaves a receipt, by
        which the next attempt knows.
        """
        receipt = f"{self.prefix}receipts/{uuid.uuid4().hex}".encode()
        with self._lock:
            used, self._used = self._used[:_RECEIPTS], self._used[_RECEIPTS:]
        success = [*write, put(receipt, b"", self.lease.id), *map(delete, used)]
        result = self._transact([*compare, unchanged(receipt, 0)], success, [*read, get(receipt)])
        done = result.succeeded or bool(result.responses[-1])
        with self._lock:
            self._used += [receipt] if done else used
        return done, result.responses

    def _transact(
        self, compare: Sequence[object], success: Sequence[object], failure: Sequence[object] = ()
    ) -> TransactionResult:
        def write(client: EtcdClient) -> TransactionResult:
            return self.lease.under(lambda: client.transaction(compare, success, failure), client.limits)

        return self._call(write)

    def _call(self, call: Callable[[EtcdClient], _T], timeout: timedelta | None = None) -> _T:
        seconds = (self._timeout if timeout is None else timeout).total_seconds()
        try:
            return call(self.client.limited(seconds))
        except EtcdUnavailableError as error:
            raise DistNetworkError(str(error)) from error
        except EtcdError as error:
            raise DistStoreError(str(error)) from error


def _bytes(text: str | bytes) -> bytes:
    if isinstance(text, str):
        return text.encode()
    if isinstance(text, bytes | bytearray | memoryview):
        return bytes(text)
    raise TypeError(f"keys and values of a store are str or bytes, not {type(text).__name__}")
