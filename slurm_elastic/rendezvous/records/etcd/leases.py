"""Leases: keys that live as long as a client renews their lease."""

from __future__ import annotations

import hashlib
import logging
import random
import threading
import time

from slurm_elastic.rendezvous.records.etcd._client_thread import ClientThread
from slurm_elastic.rendezvous.records.etcd._stubs import load_rpc
from slurm_elastic.rendezvous.records.etcd.errors import (
    EtcdError,
    EtcdLeaseExistsError,
    EtcdLeaseLostError,
    EtcdUnavailableError,
)
from slurm_elastic.rendezvous.records.etcd.failover_channel import Connection, Limits

__all__ = ["KeepAlive", "Lease", "shared_lease_id"]

logger = logging.getLogger(__name__)


def shared_lease_id(name: str | bytes) -> int:
    """Return the lease id that all processes derive from a name, a positive int64."""
    digest = hashlib.sha256(name.encode() if isinstance(name, str) else name).digest()
    return int.from_bytes(digest[:8], "big") % (2**63 - 1) + 1


class Lease:
    """A lease that a thread keeps alive until it is closed, revoked or lost.

    Attributes:
        id: etcd's number for it.
        ttl: Seconds that it lives on after the last renewal.
        renewed_at: When the last renewal that etcd confirmed was sent, on this process's monotonic clock. Before
            ``renewed_at + ttl`` the lease cannot have expired; after that it may have, unless etcd itself was
            down: etcd gives all leases their whole time again after it elected a leader.
    """

    def __init__(self, connection: Connection, ttl: int, lease_id: int, *, shared: bool) -> None:
        self._connection = connection
        self._etcd = load_rpc().etcd
        self._shared = shared
        self._lost = threading.Event()
        self.ttl = ttl
        self.id = lease_id
        self.renewed_at = time.monotonic()

    @property
    def lost(self) -> bool:
        """Return whether etcd said that the lease is gone. A shared lease is granted again instead."""
        return self._lost.is_set()

    def grant(self, limits: Limits) -> None:
        """Have etcd make the lease; a shared one may be there already.

        Raises:
            EtcdError: See :meth:`Connection.call`.
        """
        sent_at = time.monotonic()
        request = self._etcd.LeaseGrantRequest(TTL=self.ttl, ID=self.id)
        try:
            response, _ = self._connection.call("Lease", "LeaseGrant", request, limits)
        except EtcdLeaseExistsError:
            if not self._shared:
                raise
        else:
            self.id, self.ttl = response.ID, response.TTL
        self.renewed_at = sent_at

    def renew(self, limits: Limits) -> None:
        """Renew the lease now.

        Raises:
            EtcdLeaseLostError: It is gone, and its keys with it. A shared lease is granted again, empty.
            EtcdError: See :meth:`Connection.call`.
        """
        sent_at = time.monotonic()
        request = self._etcd.LeaseKeepAliveRequest(ID=self.id)
        response, _ = self._connection.call("Lease", "LeaseKeepAlive", request, limits)
        if response.TTL > 0:
            self.renewed_at = sent_at
        elif self._shared:
            self.grant(limits)
        else:
            self._lost.set()
            raise EtcdLeaseLostError(f"the etcd lease {self.id:x} has expired, and its keys with it")

    def revoke(self, limits: Limits) -> None:
        """Give the lease up; etcd deletes its keys at once."""
        self._lost.set()
        try:
            self._connection.call("Lease", "LeaseRevoke", self._etcd.LeaseRevokeRequest(ID=self.id), limits)
        except EtcdLeaseLostError:
            return


class KeepAlive(ClientThread):
    """The thread that renews the leases of a client, each about three times in its ttl."""

    def __init__(self) -> None:
        super().__init__("etcd-keep-alive")
        self._due: dict[Lease, float] = {}

    def add(self, lease: Lease) -> None:
        """Keep a lease alive from now on."""
        with self._condition:
            self._due[lease] = self._next(lease)
            self._wake()

    def remove(self, lease: Lease) -> None:
        """Let a lease run out."""
        with self._condition:
            self._due.pop(lease, None)

    def _run(self) -> None:
        while True:
            with self._condition:
                if self._closed:
                    return
                lease = min(self._due, key=self._due.__getitem__, default=None)
                wait = None if lease is None else self._due[lease] - time.monotonic()
                if lease is None or (wait is not None and wait > 0):
                    self._condition.wait(wait)
                    continue
            answered = self._renew(lease)
            with self._condition:
                if lease in self._due:
                    if lease.lost:
                        del self._due[lease]
                    else:
                        # Without an answer there is no time to lose; the connection pauses between its attempts.
                        self._due[lease] = self._next(lease) if answered else time.monotonic()

    def _renew(self, lease: Lease) -> bool:
        try:
            lease.renew(Limits(timeout=max(1.0, lease.ttl / 3)))
        except EtcdLeaseLostError as error:
            logger.warning("%s", error)
        except EtcdUnavailableError:
            # The connection told about it already.
            return False
        except EtcdError as error:
            if not self._closed:
                logger.warning("cannot renew the etcd lease %x: %s", lease.id, error)
        return True

    def _next(self, lease: Lease) -> float:
        return time.monotonic() + lease.ttl / 3 * random.uniform(0.8, 1.0)
