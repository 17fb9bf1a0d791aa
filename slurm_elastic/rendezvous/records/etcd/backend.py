"""etcd v3 for torch's own DynamicRendezvousHandler: ``torchrun --rdzv-backend=etcd-v3``.

torch pickles the rendezvous state and unpickles what the backend returns (torch 2.13,
distributed/elastic/rendezvous/dynamic_rendezvous.py, _BackendRendezvousStateHolder.sync): a user who can write under
the prefix can run code in every agent. So it requires a user or a client certificate of etcd, which has to give each
user a prefix of its own. The project's own rendezvous unpickles nothing.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

from torch.distributed.elastic.rendezvous.api import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousParameters,
    RendezvousStateError,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, Token
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler as create_dynamic_handler

from slurm_elastic.errors import UsageError
from slurm_elastic.rendezvous.records.etcd.client import EtcdClient
from slurm_elastic.rendezvous.records.etcd.config import ENVIRONMENT_PREFIX, load_config
from slurm_elastic.rendezvous.records.etcd.errors import EtcdError, EtcdUnknownHostError
from slurm_elastic.rendezvous.records.etcd.store import LEASE_SECONDS, EtcdStore
from slurm_elastic.rendezvous.records.etcd.transactions import TransactionResult, get, put, unchanged

_NAME = "etcd-v3"
_OPEN_VARIABLE = f"{ENVIRONMENT_PREFIX}OPEN"
_DIGEST_BYTES = 32

_T = TypeVar("_T")


class _ProtocolError(UsageError, ValueError):
    """The error for such a protocol, a ValueError as in torch's backend."""


class EtcdV3RendezvousBackend(RendezvousBackend):
    """Holds torch's rendezvous state under one key, with the key's mod revision as fencing token.

    The key lives under a lease that all agents of the run keep alive together: no single agent's end takes the state
    away, and after the last one's end it is gone within a minute.

    Args:
        client: The connection to etcd.
        prefix: The prefix of the run's keys, with a slash at its end.

    Attributes:
        client: See above.
        lease: Of the run's keys, shared by all agents.

    Raises:
        RendezvousConnectionError: etcd did not answer, or refused.
    """

    def __init__(self, client: EtcdClient, prefix: str) -> None:
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

        def write() -> TransactionResult:
            return self.client.transaction(
                [unchanged(self._key, token or 0)], [put(self._key, content, self.lease.id)], [get(self._key)]
            )

        result = _translated(lambda: self.lease.under(write, self.client.limits))
        if result.succeeded:
            return state, result.revision, True
        for pair in result.responses[0]:
            # An attempt whose answer was lost may have been the one that wrote what is there.
            return _open(pair.value), pair.mod_revision, result.retried and pair.value == content
        return None


def create_backend(params: RendezvousParameters) -> tuple[EtcdV3RendezvousBackend, EtcdStore]:
    """Create a backend and a store from torchrun's parameters.

    The endpoint is ``host1:2379,host2:2379``, ``etcd://...``, or ``etcds://...`` for TLS. ``--rdzv-conf`` takes
    read_timeout (seconds for each call, 60 by default) and protocol (http or https, for an endpoint without a scheme),
    as torch's backend does, and the options of :mod:`slurm_elastic.rendezvous.records.etcd.config`.

    The run id decides what state is seen: a requeued job needs another, such as
    ``$SLURM_JOB_ID.$SLURM_RESTART_COUNT``, because torch's handler closes a run id for good.

    Raises:
        UsageError: An option is wrong, etcd is not what the options say, or there is neither a user nor a certificate;
            also a ValueError for a wrong protocol.
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
    client = EtcdClient(config).limited(read_timeout)
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
        raise _ProtocolError(f"the protocol in --rdzv-conf is {protocol!r}; it must be http or https")
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
    except EtcdUnknownHostError as error:
        # As with torch's backend: the name service may know the host when torchrun's caller tries again.
        raise RendezvousConnectionError(str(error)) from error
    except UsageError:
        raise
    except EtcdError as error:
        raise RendezvousConnectionError(str(error)) from error


def _open(content: bytes) -> bytes:
    digest, state = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    if hashlib.sha256(state).digest() != digest:
        raise RendezvousStateError("the rendezvous state in etcd is corrupt; something else wrote its key")
    return state
