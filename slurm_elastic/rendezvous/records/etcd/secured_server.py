"""A private etcd for the runs of one user, with TLS and a generated password."""

from __future__ import annotations

import json
import secrets
import shutil
from pathlib import Path

from slurm_elastic.ownership import require_own
from slurm_elastic.rendezvous.records.etcd.auth_setup import enable_authentication
from slurm_elastic.rendezvous.records.etcd.certificates import create_authority
from slurm_elastic.rendezvous.records.etcd.config import DEFAULT_PREFIX, ENVIRONMENT_PREFIX
from slurm_elastic.rendezvous.records.etcd.server import EtcdServer, ServerTls
from slurm_elastic.rundir import publish_file

__all__ = ["CREDENTIALS", "CREDENTIALS_VARIABLE", "PrivateServer"]

CREDENTIALS = "credentials.json"
CREDENTIALS_VARIABLE = f"{ENVIRONMENT_PREFIX}CREDENTIALS"

_USER = "slurm-elastic"


class PrivateServer:
    """One etcd with a new authority, a new user, and a credentials file by which clients find it.

    Whatever an earlier one has left in the directory is of no use any more and is removed.

    Args:
        directory: on a file system that the run's nodes share; made private.
        host: address by which other nodes reach this one.
        data_dir: where etcd keeps its data; None: in the directory.
        binary: see :func:`~slurm_elastic.rendezvous.records.etcd.machine.find_binary`.

    Raises:
        UsageError: there is no etcd, or no openssl, or the directory cannot be written.
    """

    def __init__(
        self, directory: Path, host: str, data_dir: Path | None = None, binary: str | Path | None = None
    ) -> None:
        self.directory = directory
        self.credentials = directory / CREDENTIALS
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        require_own(directory, mend="give a directory of your own")
        directory.chmod(0o700)
        self.credentials.unlink(missing_ok=True)
        data = data_dir or directory / "server"
        shutil.rmtree(data / "data", ignore_errors=True)
        authority = create_authority(directory, days=365)
        tls = ServerTls(authority.own.certificate, authority.issue("etcd", [host], directory, days=365))
        self.server = EtcdServer(data, host, binary, tls)

    def start(self) -> None:
        """Start it, lock it, and write the credentials file.

        Raises:
            EtcdError: it did not start; the message has the end of its log.
        """
        self.server.start()
        config = self.server.config
        password = secrets.token_urlsafe(32)
        # Root's password is kept nowhere: all that needs it is done here.
        enable_authentication(config, secrets.token_urlsafe(32), {_USER: (password, DEFAULT_PREFIX)})
        assert config.ca_cert is not None
        found = {
            "endpoint": str(config),
            "ca_cert": config.ca_cert.name,
            "user": _USER,
            "password": password,
            "key_prefix": DEFAULT_PREFIX,
        }
        publish_file(self.credentials, json.dumps(found, indent=2).encode() + b"\n", mode=0o600)

    def stop(self) -> None:
        """End it, and remove the credentials file."""
        self.credentials.unlink(missing_ok=True)
        self.server.stop()
