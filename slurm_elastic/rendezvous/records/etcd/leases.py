"""Leases: keys that live as long as a process that shares their lease renews it."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import random
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from slurm_elastic.rendezvous.records.etcd._stubs import load_rpc
from slurm_elastic.rendezvous.records.etcd.errors import (
    EtcdError,
    EtcdLeaseExistsError,
    EtcdLeaseLostError,
    EtcdUnavailableError,
)
from slurm_elastic.rendezvous.records.etcd.failover_channel import Connection, Limits

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


def shared_lease_id(name: str | bytes) -> int:
    """Return the lease id that all processes derive from a name, a positive int64."""
    digest = hashlib.sha256(name.encode() if isinstance(name, str) else name).digest()
    return int.from_bytes(digest[:8], "big") % (2**63 - 1) + 1


class Lease:
    """A lease that a thread renews about three times in its ttl, together with all others who use the same name.

    Args:
        connection: The calls of a client.
        ttl: Seconds.
        name: The name from which all processes derive the lease's id.

    Attributes:
        id: etcd's number for it.
        ttl: Seconds that it lives on after the last renewal.
        renewed_at: When the last renewal that etcd confirmed was sent, on this process's monotonic clock. Before
            ``renewed_at + ttl`` the lease cannot have expired; after that it may have, unless etcd itself was
            down: etcd gives all leases their whole time again after it elected a leader.
    """

    def __init__(self, connection: Connection, ttl: int, name: str) -> None:
        self._connection = connection
        self._closed = threading.Event()
        self.ttl = ttl
        self.id = shared_lease_id(name)
        self.renewed_at = time.monotonic()
        self._thread = threading.Thread(target=self._keep_alive, name="etcd-keep-alive", daemon=True)

    def grant(self, limits: Limits) -> None:
        """Have etcd make the lease, unless it is there already.

        Raises:
            EtcdError: See :meth:`Connection.call`.
        """
        sent_at = time.monotonic()
        request = load_rpc().etcd.LeaseGrantRequest(TTL=self.ttl, ID=self.id)
        with contextlib.suppress(EtcdLeaseExistsError):
            self.ttl = self._connection.call("Lease", "LeaseGrant", request, limits)[0].TTL
        self.renewed_at = sent_at

    def under(self, write: Callable[[], _T], limits: Limits) -> _T:
        """Write under this lease; once more if it ran out before, say because this process was stopped for a while."""
        try:
            return write()
        except EtcdLeaseLostError:
            self.grant(limits)
            return write()

    def keep(self, heard: Callable[[float], None] | None = None) -> None:
        """Start to renew it.

        Args:
            heard: Called by the thread after each renewal, with 0; after one without an answer, with the seconds for
                which this process has asked in vain.
        """
        self._heard = heard or (lambda silence: None)
        self._thread.start()

    def close(self) -> None:
        """End the thread; its call ends with the connection, which is closed first."""
        self._closed.set()
        self._thread.join()

    def _keep_alive(self) -> None:
        limits = Limits(timeout=max(1.0, self.ttl / 3))
        wait, silence = self.ttl / 3 * random.uniform(0.8, 1.0), 0.0
        while not self._closed.wait(wait):
            sent_at = time.monotonic()
            try:
                request = load_rpc().etcd.LeaseKeepAliveRequest(ID=self.id)
                if self._connection.call("Lease", "LeaseKeepAlive", request, limits)[0].TTL > 0:
                    self.renewed_at = sent_at
                else:
                    # It has expired, and its keys with it.
                    self.grant(limits)
            except EtcdUnavailableError:
                # The connection has logged it, and pauses between its attempts. The sum counts no time in which this
                # process was stopped: then it has received nothing.
                silence += wait + limits.timeout
                wait = 0.0
                self._heard(silence)
                continue
            except EtcdError as error:
                if not self._connection.is_closed():
                    logger.warning("cannot renew the etcd lease %x: %s", self.id, error)
            else:
                silence = 0.0
                self._heard(silence)
            wait = self.ttl / 3 * random.uniform(0.8, 1.0)
