"""An authority and certificates for a private etcd, made by the openssl command."""

from __future__ import annotations

import ipaddress
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from slurm_elastic.errors import UsageError
from slurm_elastic.rendezvous.records.etcd.errors import EtcdServerError

__all__ = ["Authority", "Certificate", "create_authority"]

_OPENSSL_SECONDS = 30
_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


@dataclass(frozen=True, slots=True)
class Certificate:
    """The files of a certificate and its key; the key is readable by its owner alone."""

    certificate: Path
    key: Path


@dataclass(frozen=True, slots=True)
class Authority:
    """An authority that signs certificates."""

    own: Certificate

    def issue(self, name: str, hosts: Iterable[str], directory: Path, days: int = 30) -> Certificate:
        """Make a certificate for a server, a client, or both.

        Args:
            name: The common name, and the stem of the files' names.
            hosts: Host names and addresses that a server with it may be reached by.
            directory: Where the files go.
            days: How long it is valid.

        Raises:
            EtcdServerError: openssl failed.
        """
        made = Certificate(directory / f"{name}.pem", directory / f"{name}-key.pem")
        names = ",".join(_alternative_name(host) for host in hosts)
        with tempfile.TemporaryDirectory() as scratch:
            request, extensions = Path(scratch, "request.pem"), Path(scratch, "extensions")
            extensions.write_text(
                "basicConstraints=critical,CA:FALSE\nkeyUsage=critical,digitalSignature\n"
                "extendedKeyUsage=serverAuth,clientAuth\nauthorityKeyIdentifier=keyid\n"
                + (f"subjectAltName={names}\n" if names else "")
            )
            _openssl("req", "-new", *_NEW_KEY, "-subj", f"/CN={name}", "-keyout", made.key, "-out", request)
            _openssl(
                *("x509", "-req", "-in", request, "-out", made.certificate, "-days", days),
                *("-CA", self.own.certificate, "-CAkey", self.own.key, "-set_serial", _serial()),
                *("-extfile", extensions),
            )
        return made


def create_authority(directory: Path, name: str = "etcd-authority", days: int = 30) -> Authority:
    """Make a new authority.

    Raises:
        UsageError: There is no openssl command.
        EtcdServerError: openssl failed.
    """
    own = Certificate(directory / f"{name}.pem", directory / f"{name}-key.pem")
    _openssl(
        *("req", "-x509", *_NEW_KEY, "-subj", f"/CN={name}", "-days", days),
        # Python asks for it since 3.13 (docs.python.org, ssl.create_default_context: VERIFY_X509_STRICT).
        *("-addext", "keyUsage=critical,keyCertSign,cRLSign"),
        *("-keyout", own.key, "-out", own.certificate),
    )
    return Authority(own)


def _alternative_name(host: str) -> str:
    try:
        return f"IP:{ipaddress.ip_address(host)}"
    except ValueError:
        return f"DNS:{host}"


def _serial() -> str:
    # RFC 5280, 4.1.2.2: positive, at most 20 bytes.
    return f"0x{int.from_bytes(os.urandom(16), 'big') + 1:x}"


def _openssl(*arguments: object) -> None:
    binary = shutil.which("openssl")
    if binary is None:
        raise UsageError("certificates for etcd are made by the openssl command, which is not installed")
    result = subprocess.run(
        [binary, *(str(argument) for argument in arguments)],
        capture_output=True,
        text=True,
        timeout=_OPENSSL_SECONDS,
        umask=0o077,
        check=False,
    )
    if result.returncode:
        lines = result.stderr.strip().splitlines() or ["no message"]
        raise EtcdServerError(f"openssl {arguments[0]} failed: {lines[-1]}")
