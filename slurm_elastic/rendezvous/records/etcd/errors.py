"""The errors of etcd, each with one line for a person."""

from __future__ import annotations

from slurm_elastic.errors import SlurmElasticError, UsageError
from slurm_elastic.rendezvous.records.api import RecordsInterruptedError, RecordsUnreachableError


class EtcdError(SlurmElasticError):
    """Base of everything that this package raises about etcd."""


class EtcdUnavailableError(EtcdError, RecordsUnreachableError):
    """No member answered before the time was up; it may answer later."""


class EtcdInterruptedError(EtcdError, RecordsInterruptedError):
    """The caller's interrupt hook ended a wait."""


class EtcdEndpointError(EtcdError, UsageError):
    """The endpoint is none of an etcd v3, or TLS does not come about."""


class EtcdUnknownHostError(EtcdEndpointError):
    """The name service knows no host of the endpoint's name."""


class EtcdAuthenticationError(EtcdError, UsageError):
    """User or password is wrong, missing, or not asked for."""


class EtcdPermissionError(EtcdError, UsageError):
    """The user may not use the keys of the prefix."""


class EtcdNoSpaceError(EtcdError, UsageError):
    """The quota of the database is used up (the NOSPACE alarm); etcd takes deletes only."""


class EtcdLeaseLostError(EtcdError):
    """The lease has expired or was revoked, and its keys with it."""


class EtcdLeaseExistsError(EtcdError):
    """A lease with the wanted id is there already."""


class EtcdServerError(EtcdError):
    """An etcd of EtcdServer did not start or did not become ready."""
