"""The configuration of an etcd client: endpoints, TLS files, user and password.

Every value but the password comes from an option, else from the environment, else from a credentials file. The
password comes from the environment or the file only: a command line can be read by every user of the node.
The credentials file is JSON, an object with any of the names in :data:`OPTIONS` and ``password``; it must be
readable by its owner alone. Paths in it are relative to its own directory.
"""

from __future__ import annotations

import ipaddress
import os
import stat
from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote, urlsplit

from slurm_elastic import typed_json
from slurm_elastic.errors import UsageError

DEFAULT_PORT = 2379
"""The client port that IANA lists for etcd."""

DEFAULT_PREFIX = "/slurm-elastic/"

ENVIRONMENT_PREFIX = "SLURM_ELASTIC_ETCD_"
"""An option's variable is this and its name in capitals, as in SLURM_ELASTIC_ETCD_CA_CERT."""

OPTIONS = ("endpoint", "ca_cert", "ssl_cert", "ssl_cert_key", "user", "key_prefix", "credentials")
"""Names of the options. ca_cert, ssl_cert and ssl_cert_key are those of torch's etcd-v2 backend
(torch 2.13, distributed/elastic/rendezvous/records/etcd_rendezvous_backend.py)."""

TORCH_NAMES = {"cacert": "ca_cert", "cert": "ssl_cert", "key": "ssl_cert_key", "etcd_prefix": "key_prefix"}
"""What torch's older etcd backend calls some of them, which are taken too (torch 2.13, distributed/elastic/rendezvous/
etcd_rendezvous.py, create_rdzv_handler)."""

_PATHS = ("ca_cert", "ssl_cert", "ssl_cert_key")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Host and client port of one member."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class EtcdConfig:
    """All that a client needs to reach etcd. The password is in no repr.

    Attributes:
        endpoints: The members to try, in any order.
        tls: Whether the members speak TLS.
        ca_cert: The authority that signed the members' certificates; None for those that the system trusts.
        ssl_cert: The client's certificate, for members that ask for one.
        ssl_cert_key: The key of that certificate.
        user: The etcd user, together with ``password``, or neither.
        prefix: All keys lie under it; starts and ends with a slash.

    Raises:
        UsageError: Values that do not go together, or files that cannot be read.
    """

    endpoints: tuple[Endpoint, ...]
    tls: bool = False
    ca_cert: Path | None = None
    ssl_cert: Path | None = None
    ssl_cert_key: Path | None = None
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    prefix: str = DEFAULT_PREFIX

    def __post_init__(self) -> None:
        if not self.endpoints:
            raise UsageError("no etcd endpoint is given; write etcd://host1:2379,host2:2379")
        if (self.ssl_cert is None) != (self.ssl_cert_key is None):
            raise UsageError("etcd's ssl_cert and ssl_cert_key go together; give both or neither")
        if (self.user is None) != (self.password is None):
            raise UsageError(
                "etcd's user and password go together; give both or neither "
                f"(the password by {ENVIRONMENT_PREFIX}PASSWORD or the credentials file)"
            )
        if not self.tls and (self.ca_cert or self.ssl_cert):
            raise UsageError("etcd certificates are given, but no TLS is asked for; write etcds:// in the endpoint")
        if not (self.prefix.startswith("/") and self.prefix.endswith("/")):
            raise UsageError(f"the etcd key_prefix {self.prefix!r} must start and end with a slash")
        for path in (self.ca_cert, self.ssl_cert, self.ssl_cert_key):
            if path is not None and not os.access(path, os.R_OK):
                raise UsageError(f"cannot read the etcd certificate file {path}; check the path and its mode")

    def run_prefix(self, run_id: str) -> str:
        """Return the prefix of a run's keys, with a slash at its end."""
        return f"{self.prefix}{quote(run_id, safe='')}/"

    def __str__(self) -> str:
        scheme = "etcds" if self.tls else "etcd"
        return f"{scheme}://{','.join(str(endpoint) for endpoint in self.endpoints)}"


def load_config(
    endpoint: str = "", options: Mapping[str, object] | None = None, environment: Mapping[str, str] | None = None
) -> EtcdConfig:
    """Put together where etcd is and how to be let in.

    Args:
        endpoint: ``etcd://host1:2379,host2:2379``, ``etcds://...`` for TLS, or without a scheme. Empty: from
            the environment or the credentials file.
        options: Values by the names in :data:`OPTIONS` or :data:`TORCH_NAMES`; other names are left alone, so that
            torchrun's ``--rdzv-conf`` can be given as it is.
        environment: The variables to read; None for those of this process.

    Raises:
        UsageError: A value that cannot be, or a password where others can read it.
    """
    values = _with_own_names(options or {})
    variables = os.environ if environment is None else environment
    if values.get("password") is not None:
        raise UsageError(
            "an etcd password among the options can be read by every user of the node; "
            f"give it by {ENVIRONMENT_PREFIX}PASSWORD or a credentials file"
        )

    own = {name: str(values[name]) for name in OPTIONS if values.get(name)}
    names = (*OPTIONS, "password", "plain_password")
    from_environment = {name: variables.get(ENVIRONMENT_PREFIX + name.upper(), "") for name in names}
    value = ChainMap(own, {name: text for name, text in from_environment.items() if text})
    if credentials := value.get("credentials"):
        value.maps.append(_read_credentials(Path(credentials)))
    ca_cert, ssl_cert, ssl_cert_key = (Path(value[name]) if name in value else None for name in _PATHS)
    scheme, endpoints = _parse_endpoints(endpoint or value.get("endpoint", ""))
    config = EtcdConfig(
        endpoints=endpoints,
        tls=scheme == "etcds" or (scheme == "" and any(name in value for name in _PATHS)),
        ca_cert=ca_cert,
        ssl_cert=ssl_cert,
        ssl_cert_key=ssl_cert_key,
        user=value.get("user"),
        password=value.get("password"),
        prefix=value.get("key_prefix", DEFAULT_PREFIX),
    )
    exposed = [end.host for end in config.endpoints if not _is_loopback(end.host)]
    if config.password is not None and not config.tls and exposed and "plain_password" not in value:
        raise UsageError(
            f"etcd's password would go to {exposed[0]} unencrypted, and every host on the way could read it; "
            f"write etcds://, or set {ENVIRONMENT_PREFIX}PLAIN_PASSWORD=1 to send it all the same"
        )
    return config


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _with_own_names(options: Mapping[str, object]) -> dict[str, object]:
    own = {name: value for name, value in options.items() if name not in TORCH_NAMES}
    for torch_name, name in TORCH_NAMES.items():
        text = str(options.get(torch_name) or "")
        if text and own.get(name):
            raise UsageError(f"{torch_name} and {name} are two names of one option of etcd; give one of them")
        if text:
            # torch's prefix needs no slash at either end, and its default has none at the end.
            own[name] = f"/{text.strip('/')}/" if name == "key_prefix" else text
    return own


def _parse_endpoints(text: str) -> tuple[str, tuple[Endpoint, ...]]:
    scheme, separator, rest = text.strip().rpartition("://")
    if separator and scheme not in ("etcd", "etcds"):
        raise UsageError(f"the etcd endpoint {text!r} has an unknown scheme; write etcd:// or, for TLS, etcds://")
    if "@" in rest:
        raise UsageError(
            "user and password do not belong into the etcd endpoint; "
            f"use {ENVIRONMENT_PREFIX}USER and {ENVIRONMENT_PREFIX}PASSWORD or a credentials file"
        )
    members = [member.strip() for member in rest.rstrip("/").split(",") if member.strip()]
    return scheme, tuple(dict.fromkeys(_parse_endpoint(member) for member in members))


def _parse_endpoint(member: str) -> Endpoint:
    try:
        parts = urlsplit(f"//{member}")
        port = DEFAULT_PORT if parts.port is None else parts.port
        if parts.hostname and port and parts.netloc == member:
            return Endpoint(parts.hostname, port)
    except ValueError:
        pass
    raise UsageError(
        f"the etcd endpoint {member!r} is no host:port; write for example node1:2379, an IPv6 address as [::1]:2379"
    )


def _read_credentials(path: Path) -> dict[str, str]:
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise UsageError(f"the etcd credentials file {path} is no plain file")
            if stat.S_IMODE(status.st_mode) & 0o077:
                raise UsageError(f"the etcd credentials file {path} can be read by others; chmod 600 {path}")
            content = typed_json.decode(file.read(), dict[str, str])
    except OSError as error:
        raise UsageError(f"cannot read the etcd credentials file {path}: {error.strerror}") from None
    except typed_json.JSONError:
        raise UsageError(f"the etcd credentials file {path} must be a JSON object of strings") from None
    names = {*OPTIONS, "password"} - {"credentials"}
    if unknown := sorted(content.keys() - names):
        raise UsageError(
            f"the etcd credentials file {path} has the unknown name {unknown[0]!r}; known: {sorted(names)}"
        )
    return {name: str(path.parent / text) if name in _PATHS else text for name, text in content.items() if text}
