"""Several etcd members with TLS and authentication."""

from __future__ import annotations

import secrets
from dataclasses import replace
from pathlib import Path

from slurm_elastic.rendezvous.records.etcd import EtcdConfig, EtcdServer
from slurm_elastic.rendezvous.records.etcd.auth_setup import enable_authentication
from slurm_elastic.rendezvous.records.etcd.certificates import create_authority
from slurm_elastic.rendezvous.records.etcd.config import EtcdTimes
from slurm_elastic.rendezvous.records.etcd.errors import EtcdServerError
from slurm_elastic.rendezvous.records.etcd.machine import free_port
from slurm_elastic.rendezvous.records.etcd.server import ServerTls

PATIENT = EtcdTimes(probe=30.0, outage=30.0)
"""No member counts as lost because the machine is busy; one that has ended does all the same."""

_ATTEMPTS = 3
_SECONDS = 120.0
"""For what takes a second where nobody else is at work: three members find each other, a password is hashed."""


class Cluster:
    """Members that need a certificate from each client, and know the users root, trainer and other."""

    def __init__(self, directory: Path, binary: Path, size: int = 3, host: str = "127.0.0.1") -> None:
        self.directory = directory
        self.authority = create_authority(directory)
        tls = ServerTls(
            self.authority.own.certificate,
            self.authority.issue("member", [host, "localhost"], directory),
            ask_clients=True,
        )
        client = self.authority.issue("client", [], directory)
        for attempt in range(1, _ATTEMPTS + 1):
            ports = {f"member{number}": free_port(host) for number in range(size)}
            self.members = [
                EtcdServer(
                    directory / f"{name}-{attempt}",
                    host=host,
                    binary=binary,
                    tls=tls,
                    name=name,
                    client_port=free_port(host),
                    peer_port=port,
                    cluster=ports,
                )
                for name, port in ports.items()
            ]
            try:
                self.start()
                break
            except EtcdServerError:
                self.stop()
                if attempt == _ATTEMPTS:
                    raise
        self.anonymous = EtcdConfig(
            tuple(member.config.endpoints[0] for member in self.members),
            tls=True,
            ca_cert=tls.authority,
            ssl_cert=client.certificate,
            ssl_cert_key=client.key,
        )
        password = secrets.token_urlsafe()
        enable_authentication(
            self.anonymous,
            secrets.token_urlsafe(),
            {"trainer": (password, self.anonymous.prefix), "other": (password, "/other/")},
            timeout=_SECONDS,
        )
        self.config = replace(self.anonymous, user="trainer", password=password)

    def start(self) -> None:
        """Start those members that do not run."""
        for member in self.members:
            if member.pid is None:
                member.launch()
        for member in self.members:
            member.wait_ready(_SECONDS)

    def stop(self) -> None:
        for member in self.members:
            member.kill()
