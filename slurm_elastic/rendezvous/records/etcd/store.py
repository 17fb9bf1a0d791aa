"""etcd v3 as torch takes it: a Store, and a backend of its DynamicRendezvousHandler (``--rdzv-backend=etcd-v3``).

torch pickles the rendezvous state and unpickles what the backend returns (torch 2.13,
distributed/elastic/rendezvous/dynamic_rendezvous.py, _BackendRendezvousStateHolder.sync): a user who can write under
the prefix can run code in every agent. So it requires a user or a client certificate of etcd, which has to give each
user a prefix of its own. The project's own rendezvous unpickles nothing.
"""

from __future__ import annotations

import hashlib
import operator
import os
import random
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

from torch._C._distributed_c10d import Store
from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed.elastic.rendezvous.api import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousParameters,
    RendezvousStateError,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, Token
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler as create_dynamic_handler

from slurm_elastic.errors import UsageError
from slurm_elastic.rendezvous.records.etcd import client as etcd
from slurm_elastic.rendezvous.records.etcd.config import ENVIRONMENT_PREFIX, load_config
from slurm_elastic.rendezvous.records.etcd.errors import EtcdError, EtcdUnavailableError, EtcdUnknownHostError

LEASE_SECONDS = 45
"""How long a store's keys outlive the last process that has it open; with what etcd adds, less than a minute."""

_DEFAULT_TIMEOUT = timedelta(seconds=300)  # torch 2.13, csrc/distributed/c10d/Store.hpp, kDefaultTimeout
_CONTENTION_SECONDS = 0.02

_NAME = "etcd-v3"
_OPEN_VARIABLE = f"{ENVIRONMENT_PREFIX}OPEN"
_DIGEST_BYTES = 32

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

    def __init__(self, etcd_client: etcd.EtcdClient, etcd_store_prefix: str, timeout: timedelta | None = None) -> None:
        super().__init__()
        self.set_timeout(_DEFAULT_TIMEOUT if timeout is None else timeout)
        self.client = etcd_client
        self.prefix = etcd_store_prefix if etcd_store_prefix.endswith("/") else f"{etcd_store_prefix}/"
        self._keys = f"{self.prefix}keys/".encode()
        self._receipts = f"{self.prefix}receipts/{uuid.uuid4().hex}/"
        self.lease: etcd.Lease = etcd_client.shared_lease(self.prefix, LEASE_SECONDS)
        # torch's C++ side keeps the C++ half of a store only (torch 2.13: neither PrefixStore nor a process group
        # keeps the Python object), and without its Python half a store can do nothing.
        etcd_client.held.append(self)

    def set(self, key: str | bytes, value: str | bytes) -> None:
        """Write a key."""
        self._transact([], [etcd.put(self._key(key), etcd.to_bytes(value), self.lease.id)])

    def get(self, key: str | bytes) -> bytes:
        """Return what a key holds, after waiting for it if need be."""
        return self.multi_get([key])[0]

    def add(self, key: str | bytes, amount: int) -> int:
        """Add to the decimal number that a key holds, 0 if there is none, and return the sum.

        Raises:
            TypeError: The amount is no integer; nothing is written.
            ValueError: The key holds something else.
        """
        amount = operator.index(amount)
        return int(self._update(key, lambda value: b"%d" % (int(value or 0) + amount)) or 0)

    def append(self, key: str | bytes, value: str | bytes) -> None:
        """Write a value behind what a key holds."""
        self._update(key, lambda start: (start or b"") + etcd.to_bytes(value))

    def compare_set(self, key: str | bytes, expected: str | bytes, desired: str | bytes) -> bytes:
        """Write a key if it holds what is expected, or if there is none and nothing is expected.

        Returns:
            What the key holds now; what was expected when there is no such key (as TCPStore does).
        """
        before, after = etcd.to_bytes(expected), etcd.to_bytes(desired)
        value = self._update(key, lambda value: after if (value or b"") == before else value)
        return before if value is None else value

    def check(self, keys: Sequence[str | bytes]) -> bool:
        """Return whether all keys are there."""
        there, _ = self._read(keys)
        return all(self._key(key) in there for key in keys)

    def wait(self, keys: Sequence[str | bytes], timeout: timedelta | None = None) -> None:
        """Wait until all keys are there."""
        self._wait(keys, self._timeout if timeout is None else timeout)

    def multi_get(self, keys: Sequence[str | bytes]) -> list[bytes]:
        """Return what several keys hold, after waiting for them if need be."""
        there = self._wait(keys, self._timeout)
        return [there[self._key(key)] for key in keys]

    def multi_set(self, keys: Sequence[str | bytes], values: Sequence[str | bytes]) -> None:
        """Write several keys, up to 128 of them at once."""
        # A transaction may not write a key twice; the last one counts, as if they were written in order.
        values_by_key = {self._key(key): etcd.to_bytes(value) for key, value in zip(keys, values, strict=True)}
        puts = [etcd.put(key, value, self.lease.id) for key, value in values_by_key.items()]
        for start in range(0, len(puts), etcd.MAX_OPERATIONS):
            self._transact([], puts[start : start + etcd.MAX_OPERATIONS])

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
        return self._keys + etcd.to_bytes(key)

    def _read(self, keys: Sequence[str | bytes]) -> tuple[dict[bytes, bytes], int]:
        return self._call(lambda client: client.get_present(self._key(key) for key in dict.fromkeys(keys)))

    def _wait(self, keys: Sequence[str | bytes], timeout: timedelta) -> dict[bytes, bytes]:
        """Return what keys hold as soon as all are there."""
        deadline = time.monotonic() + timeout.total_seconds()
        while True:
            there, revision = self._read(keys)
            # The others are read again when the first has come, and most of them are there then.
            first = next((whole for key in keys if (whole := self._key(key)) not in there), None)
            if first is None:
                return there
            if time.monotonic() >= deadline:
                # The words are TCPStore's.
                names = ", ".join("/" + etcd.to_bytes(name).decode(errors="replace") for name in keys)
                raise DistStoreError(f"wait timeout after {round(timeout.total_seconds() * 1000)}ms, keys: {names}")
            self.client.await_put(first, revision, deadline)

    def _update(self, key: str | bytes, change: Callable[[bytes | None], bytes | None]) -> bytes | None:
        """Replace what a key holds by what ``change`` makes of it, exactly once; None stands for no key.

        A transaction whose answer was lost with its member may have been carried out. So each thread leaves the number
        of its last one, by which it knows.
        """
        whole, receipt = self._key(key), f"{self._receipts}{threading.get_ident()}"
        pair = self._call(lambda client: client.get(whole))
        contentions = 0
        while True:
            before = None if pair is None else pair.value
            value = change(before)
            if value is None or value == before:
                return value
            number = uuid.uuid4().bytes
            result = self._transact(
                [etcd.unchanged(whole, pair.mod_revision if pair else 0)],
                [etcd.put(whole, value, self.lease.id), etcd.put(receipt, number, self.lease.id)],
                [etcd.get(whole), etcd.get(receipt)],
            )
            if result.succeeded or any(last.value == number for last in result.responses[1]):
                return value
            pair = next(iter(result.responses[0]), None)
            contentions += 1
            time.sleep(random.uniform(0, _CONTENTION_SECONDS * min(contentions, 10)))

    def _transact(
        self, compare: Sequence[object], success: Sequence[object], failure: Sequence[object] = ()
    ) -> etcd.TransactionResult:
        return self._call(lambda client: client.transaction(compare, success, failure))

    def _call(self, call: Callable[[etcd.EtcdClient], _T]) -> _T:
        try:
            return call(self.client.limited(self._timeout.total_seconds()))
        except EtcdUnavailableError as error:
            raise DistNetworkError(str(error)) from error
        except EtcdError as error:
            raise DistStoreError(str(error)) from error


class EtcdV3RendezvousBackend(RendezvousBackend):
    """Holds torch's rendezvous state under one key, with the key's mod revision as fencing token.

    The key lives under a lease that all agents of the run keep alive together: no single agent's end takes the state
    away, and after the last one's end it is gone within a minute.

    Args:
        client: The connection to etcd.
        prefix: The prefix of the run's keys, with a slash at its end.

    Attributes:
        lease: Of the run's keys, shared by all agents.

    Raises:
        RendezvousConnectionError: etcd did not answer, or refused.
    """

    def __init__(self, client: etcd.EtcdClient, prefix: str) -> None:
        self.client = client
        self._key = f"{prefix}state"
        self.lease = _translated(lambda: client.shared_lease(prefix, LEASE_SECONDS))

    @property
    def name(self) -> str:
        """See base class."""
        return _NAME

    def get_state(self) -> tuple[bytes, Token] | None:
        """See base class."""
        pair = _translated(lambda: self.client.get(self._key))
        return None if pair is None else (_open(pair.value), pair.mod_revision)

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        """See base class."""
        if token is not None and type(token) is not int:
            current = self.get_state()
            return None if current is None else (*current, False)
        content = hashlib.sha256(state).digest() + state
        result = _translated(
            lambda: self.client.transaction(
                [etcd.unchanged(self._key, token or 0)],
                [etcd.put(self._key, content, self.lease.id)],
                [etcd.get(self._key)],
            )
        )
        if result.succeeded:
            return state, result.revision, True
        for pair in result.responses[0]:
            # Then an attempt whose answer was lost may have written it; another agent's is as good.
            return _open(pair.value), pair.mod_revision, pair.value == content
        return None


def create_backend(params: RendezvousParameters) -> tuple[EtcdV3RendezvousBackend, EtcdStore]:
    """Create a backend and a store from torchrun's parameters.

    The endpoint is ``host1:2379,host2:2379``, ``etcd://...``, or ``etcds://...`` for TLS. ``--rdzv-conf`` takes
    read_timeout (seconds for each call, 60 by default) and protocol (http or https, for an endpoint without a scheme),
    as torch's backend does, and the options of :mod:`slurm_elastic.rendezvous.records.etcd.config`.

    The run id decides what state is seen: a requeued job needs another, such as
    ``$SLURM_JOB_ID.$SLURM_RESTART_COUNT``, because torch's handler closes a run id for good.

    Raises:
        UsageError: An option is wrong, etcd is not what the options say, or there is neither a user nor a certificate.
        RendezvousConnectionError: etcd did not answer, or the name service does not know its host.
    """
    config = load_config(_with_scheme(params.endpoint, params.get("protocol")), params.config)
    if config.user is None and config.ssl_cert is None and not os.environ.get(_OPEN_VARIABLE):
        raise UsageError(
            f"the etcd-v3 backend runs what is in etcd as code (torch unpickles it), and {config} would take it from "
            f"everybody; give it a user or a client certificate, or set {_OPEN_VARIABLE}=1 where nobody else reaches it"
        )
    read_timeout = params.get_as_int("read_timeout", 60)
    if read_timeout is None or read_timeout <= 0:
        raise UsageError("the read_timeout in --rdzv-conf must be a positive number of seconds")
    client = etcd.EtcdClient(config).limited(read_timeout)
    try:
        _translated(client.connect)
        prefix = f"{config.run_prefix(params.run_id)}torch/"
        backend = EtcdV3RendezvousBackend(client, prefix)
        return backend, _translated(lambda: EtcdStore(client, f"{prefix}store", timedelta(seconds=read_timeout)))
    except BaseException:
        client.close()
        raise


def create_handler(params: RendezvousParameters) -> RendezvousHandler:
    """Create torch's handler on top of :func:`create_backend`."""
    backend, store = create_backend(params)
    return create_dynamic_handler(store, backend, params)


def _with_scheme(endpoint: str, protocol: object) -> str:
    schemes = {"": "", "http": "etcd://", "https": "etcds://"}
    scheme = schemes.get(str(protocol or "").strip().lower())
    if scheme is None:
        raise UsageError(f"the protocol in --rdzv-conf is {protocol!r}; it must be http or https")
    if not endpoint:
        return endpoint
    if "://" not in endpoint:
        return f"{scheme}{endpoint}"
    if scheme and not endpoint.strip().startswith(scheme):
        raise UsageError(f"protocol={protocol} contradicts the endpoint {endpoint}; leave one of them out")
    return endpoint


def _translated(call: Callable[[], _T]) -> _T:
    try:
        return call()
    except EtcdError as error:
        # As with torch's backend: the name service may know a host when torchrun's caller tries again.
        if isinstance(error, UsageError) and not isinstance(error, EtcdUnknownHostError):
            raise
        raise RendezvousConnectionError(str(error)) from error


def _open(content: bytes) -> bytes:
    digest, state = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    if hashlib.sha256(state).digest() != digest:
        raise RendezvousStateError("the rendezvous state in etcd is corrupt; something else wrote its key")
    return state
