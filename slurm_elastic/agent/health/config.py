"""The settings and the socket of the health port."""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from slurm_elastic.errors import UsageError

logger = logging.getLogger("slurm_elastic")

_LOOPBACK = "127.0.0.1"
_PORT_VARIABLE = "TORCHELASTIC_HEALTH_CHECK_PORT"
_TOKEN_VARIABLE = "SLURM_ELASTIC_HEALTH_TOKEN"
_TOKEN = re.compile(r"[!-~]{16,512}")
_BACKLOG = 64


@dataclass(frozen=True, slots=True)
class HealthSettings:
    """The user's settings of the health port.

    Attributes:
        bind: An address of this node.
        port: The port; 0 for any free one.
        token: The token that clients have to send; None for that of the run directory.
    """

    bind: str = _LOOPBACK
    port: int = 0
    token: str | None = field(default=None, repr=False)

    @property
    def protected(self) -> bool:
        """True if users of other nodes reach the port, so that all pages but liveness require the token."""
        return not ipaddress.ip_address(self.bind).is_loopback


def health_settings(
    bind: str | None, port: str | None, token_file: str | None, environ: Mapping[str, str]
) -> HealthSettings:
    """Resolve the options; None for options that are not given.

    Without ``--health-port`` the port is torch's TORCHELASTIC_HEALTH_CHECK_PORT. The token may also be in
    SLURM_ELASTIC_HEALTH_TOKEN.

    Raises:
        UsageError: A value is malformed, or the token's file cannot be used.
    """
    address = bind or _LOOPBACK
    try:
        ipaddress.ip_address(address)
    except ValueError:
        raise UsageError(
            f"--health-bind {address!r} is no IP address; give 0.0.0.0 for all addresses of this node, or one of them"
        ) from None
    name, text = ("--health-port", port) if port is not None else (_PORT_VARIABLE, environ.get(_PORT_VARIABLE, "0"))
    if not re.fullmatch(r"[0-9]{1,5}", text.strip()) or int(text) > 65535:
        raise UsageError(f"{name} {text!r} is no port; give a number up to 65535, or 0 for any free one")
    token = _read_token(Path(token_file)) if token_file else environ.get(_TOKEN_VARIABLE)
    if token is not None and not _TOKEN.fullmatch(token):
        where = token_file or _TOKEN_VARIABLE
        raise UsageError(
            f"{where} has no token: give one line of 16 to 512 visible characters, as openssl rand -hex 32"
        )
    return HealthSettings(address, int(text), token)


def listen(settings: HealthSettings) -> socket.socket:
    """Open the port; if it is in use, for instance by another job of the user on this node, open any free one.

    Raises:
        UsageError: The address belongs to another host, or only root may open the port.
    """
    try:
        return _open(settings.bind, settings.port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            logger.warning("health port %d is in use on this node; the agent takes a free one", settings.port)
        elif error.errno == errno.EACCES:
            raise UsageError(
                f"--health-port {settings.port}: only root may open ports below "
                f"{_unprivileged()}; give a higher one, or 0 for any free one"
            ) from None
        elif error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.EINVAL):
            raise UsageError(
                f"--health-bind {settings.bind}: no address of this node ({os.strerror(error.errno)}); "
                "give 0.0.0.0 for all addresses of this node"
            ) from None
        else:
            raise
    return _open(settings.bind, 0)


def _open(bind: str, port: int) -> socket.socket:
    address = ipaddress.ip_address(bind)
    if address.version == 4:
        return socket.create_server((bind, port), backlog=_BACKLOG)
    dual = address == ipaddress.IPv6Address("::") and socket.has_dualstack_ipv6()
    return socket.create_server((bind, port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=dual)


def _unprivileged() -> str:
    # ip(7), ip_unprivileged_port_start
    try:
        return Path("/proc/sys/net/ipv4/ip_unprivileged_port_start").read_text().strip()
    except OSError:
        return "1024"


def _read_token(path: Path) -> str:
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.read(1024)
    except OSError as error:
        raise UsageError(f"--health-token-file {path}: {error.strerror}; give a file that you can read") from None
    if mode & 0o077:
        raise UsageError(f"--health-token-file {path} is open to others (mode {mode & 0o777:04o}); chmod 600 it")
    return content.decode("latin-1").strip()
