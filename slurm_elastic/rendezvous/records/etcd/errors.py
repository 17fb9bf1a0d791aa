"""The errors of etcd, each with one line for a person, and why a call failed: etcd's own answers, and what really
answers at an endpoint."""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
from collections.abc import Collection

from slurm_elastic import typed_json
from slurm_elastic.errors import SlurmElasticError, UsageError
from slurm_elastic.rendezvous.records.api import RecordsUnreachableError
from slurm_elastic.rendezvous.records.etcd.config import DEFAULT_PORT, ENVIRONMENT_PREFIX, Endpoint, EtcdConfig


class EtcdError(SlurmElasticError):
    """Base of everything that this package raises about etcd."""


class EtcdUnavailableError(EtcdError, RecordsUnreachableError):
    """No member answered before the time was up; it may answer later."""


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


_PROBE_SECONDS = 1.0
_UNKNOWN_HOST = "there is no host of this name"


_CREDENTIALS = f"give {ENVIRONMENT_PREFIX}USER and {ENVIRONMENT_PREFIX}PASSWORD or a credentials file"
_REFUSALS: tuple[tuple[str, type[EtcdError], str], ...] = (
    ("requested lease not found", EtcdLeaseLostError, "the etcd lease has expired, and its keys with it"),
    ("lease already exists", EtcdLeaseExistsError, "an etcd lease with this id exists already"),
    (
        "database space exceeded",
        EtcdNoSpaceError,
        "the database of etcd at {config} is full (NOSPACE); its administrator has to free space: "
        "etcdctl compact, etcdctl defrag, etcdctl alarm disarm, or a larger --quota-backend-bytes",
    ),
    (
        "invalid user ID or password",
        EtcdAuthenticationError,
        "etcd at {config} does not accept the password of user {config.user!r}; check "
        f"{ENVIRONMENT_PREFIX}USER and {ENVIRONMENT_PREFIX}PASSWORD or the credentials file",
    ),
    ("user name is empty", EtcdAuthenticationError, f"etcd at {{config}} asks for user and password; {_CREDENTIALS}"),
    (
        "permission denied",
        EtcdPermissionError,
        "etcd at {config} denies {user} the keys under {config.prefix}; etcdctl role grant-permission --prefix=true "
        f"ROLE readwrite {{config.prefix}}, choose another key_prefix, or {_CREDENTIALS}",
    ),
    (
        "authentication is not enabled",
        EtcdAuthenticationError,
        "etcd at {config} has no authentication; leave out user and password, or etcdctl auth enable",
    ),
)
"""What etcd says when it refuses a request for good (etcd 3.4 and 3.5, etcdserver/api/v3rpc/rpctypes/error.go)."""


_OLD_TOKEN = ("invalid auth token", "revision of auth store is old")
"""A member does not know our token: simple tokens live for minutes, and a restart forgets them."""

_TRANSIENT = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED", "ABORTED", "INTERNAL", "UNKNOWN")
"""gRPC's codes for a member that is lost, slow, cut off from the others, or electing a leader with them."""


def is_old_token(details: str) -> bool:
    """Return whether a member asks for a new token."""
    return any(text in details for text in _OLD_TOKEN)


def diagnose_answer(code: str, details: str, config: EtcdConfig) -> EtcdError | None:
    """Return what a failed call means for the caller; None if another member, or the same one later, may answer it."""
    for text, error, line in _REFUSALS:
        if text in details:
            user = "clients without a user" if config.user is None else f"user {config.user!r}"
            return error(line.format(config=config, user=user))
    if code == "UNIMPLEMENTED":
        return EtcdEndpointError(f"what answers at {config} has no etcd v3 API; slurm_elastic needs etcd 3.4 or later")
    if code in _TRANSIENT or is_old_token(details) or "too many requests" in details:
        return None
    return EtcdError(f"etcd at {config} refused a request: {details or code}")


def short_reason(code: str, details: str) -> str:
    """Return a few words for a lost member's line in the log."""
    if code == "DEADLINE_EXCEEDED":
        return "no answer in time"
    return details.rpartition(": ")[2].strip().rstrip(".").lower() or code.lower()


def endpoint_error(findings: Collection[str]) -> EtcdEndpointError:
    """Return the error for endpoints of which none is what it should be."""
    unknown = all(_UNKNOWN_HOST in finding for finding in findings)
    kind = EtcdUnknownHostError if unknown else EtcdEndpointError
    return kind(f"cannot use etcd: {'; '.join(findings)}")


def probe_endpoint(endpoint: Endpoint, config: EtcdConfig) -> str | None:
    """Look, for a second or two, at what answers at an endpoint that gRPC could not talk to.

    It asks for etcd's version, which etcd tells over HTTP/1 at the port where it speaks gRPC. gRPC's own words say too
    little (grpcio 1.85: "Socket closed" with TLS on one side only, whichever it is).

    Returns:
        What is wrong there and how to fix it; None if nothing is, or the endpoint is down or slow.
    """
    connected = False
    try:
        with contextlib.closing(_http_connection(endpoint, config)) as connection:
            connection.connect()
            connected = True
            connection.request("GET", "/version")
            # With TLS 1.3 a missing client certificate is refused only after the handshake, at the first read.
            version = str(typed_json.loads(connection.getresponse().read(4096))["etcdserver"])
    except ssl.SSLCertVerificationError as error:
        return (
            f"{endpoint}: its certificate is not accepted ({error.verify_message}); "
            "give the authority that signed it as ca_cert and a host name that the certificate carries"
        )
    except ssl.SSLError as error:
        text = (error.reason or str(error)).lower().replace("_", " ")
        if "certificate" in text:
            return f"{endpoint} does not accept our certificate ({text}); give ssl_cert and ssl_cert_key it trusts"
        return f"{endpoint} does not speak TLS ({text}); write etcd:// instead of etcds://, or check the port"
    except socket.gaierror as error:
        # EAI_AGAIN is a name server that does not answer, which may do so later.
        unknown = error.errno in (socket.EAI_NONAME, socket.EAI_NODATA)
        return f"{endpoint}: {_UNKNOWN_HOST}; check the endpoint" if unknown else None
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
        if not connected or isinstance(error, TimeoutError):
            return None
        if not config.tls and _speaks_tls(endpoint):
            return f"{endpoint} speaks TLS; write etcds:// instead of etcd:// and give its authority as ca_cert"
        return f"something else than etcd answers at {endpoint}; give etcd's client port, usually {DEFAULT_PORT}"
    if version.partition(".")[0] in ("0", "1", "2"):
        return f"etcd {version} at {endpoint} has the v2 API only; slurm_elastic needs etcd 3.4 or later"
    return None


def _http_connection(endpoint: Endpoint, config: EtcdConfig) -> http.client.HTTPConnection:
    if not config.tls:
        return http.client.HTTPConnection(endpoint.host, endpoint.port, timeout=_PROBE_SECONDS)
    context = ssl.create_default_context(cafile=str(config.ca_cert) if config.ca_cert else None)
    if config.ssl_cert:
        context.load_cert_chain(config.ssl_cert, config.ssl_cert_key)
    return http.client.HTTPSConnection(endpoint.host, endpoint.port, timeout=_PROBE_SECONDS, context=context)


def _speaks_tls(endpoint: Endpoint) -> bool:
    with contextlib.suppress(OSError):
        return bool(ssl.get_server_certificate((endpoint.host, endpoint.port), timeout=_PROBE_SECONDS))
    return False
