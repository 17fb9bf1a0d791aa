"""Several etcd members with TLS and authentication, as a site may have them."""

from __future__ import annotations

import contextlib
import os
import secrets
import ssl
import subprocess
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from slurm_elastic.rendezvous.records.etcd.config import EtcdConfig
from slurm_elastic.rendezvous.records.etcd.errors import EtcdServerError
from slurm_elastic.rendezvous.records.etcd.server import EtcdServer

_ATTEMPTS = 3
_SECONDS = 120.0
"""For what takes a second on an idle machine: three members find each other, a password is hashed."""


@dataclass(frozen=True)
class Certificate:
    certificate: Path
    key: Path


class Authority:
    """Signs certificates, by the openssl command."""

    def __init__(self, directory: Path, name: str = "authority") -> None:
        self.own = Certificate(directory / f"{name}.pem", directory / f"{name}-key.pem")
        self._directory = directory
        self._make(self.own, name, "keyUsage=critical,keyCertSign,cRLSign")

    def issue(self, name: str, *hosts: str) -> Certificate:
        made = Certificate(self._directory / f"{name}.pem", self._directory / f"{name}-key.pem")
        names = ",".join(f"{'IP' if host[0].isdigit() else 'DNS'}:{host}" for host in hosts)
        signer = ("-CA", self.own.certificate, "-CAkey", self.own.key)
        extensions = ["basicConstraints=critical,CA:FALSE", "extendedKeyUsage=serverAuth,clientAuth"]
        self._make(made, name, *extensions, *([f"subjectAltName={names}"] if names else []), signer=signer)
        return made

    def _make(self, made: Certificate, name: str, *extensions: str, signer: tuple[object, ...] = ()) -> None:
        command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        command += ["-subj", f"/CN={name}", "-days", "30", "-keyout", str(made.key), "-out", str(made.certificate)]
        command += [word for extension in extensions for word in ("-addext", extension)]
        subprocess.run([*command, *map(str, signer)], check=True, capture_output=True, umask=0o077)


class SecuredServer(EtcdServer):
    """A member with TLS, which may ask its clients for a certificate of its authority."""

    authority: Path
    own: Certificate
    asks_clients = True
    name = "default"
    cluster: Mapping[str, int] | None = None

    @property
    def config(self) -> EtcdConfig:
        config = replace(super().config, tls=True, ca_cert=self.authority)
        return (
            replace(config, ssl_cert=self.own.certificate, ssl_cert_key=self.own.key) if self.asks_clients else config
        )

    def is_ready(self) -> bool:
        context = ssl.create_default_context(cafile=self.authority)
        context.check_hostname = False
        context.load_cert_chain(self.own.certificate, self.own.key)
        handlers = urllib.request.HTTPSHandler(context=context), urllib.request.ProxyHandler({})
        direct = urllib.request.build_opener(*handlers)
        with contextlib.suppress(OSError), direct.open(f"https://{self.get_endpoint()}/health", timeout=1.0) as answer:
            return b'"true"' in answer.read()
        return False

    def command(self) -> list[str]:
        members = self.cluster or {self.name: self.peer_port}
        found = [word.replace("http://", "https://") for word in super().command()]
        found.append(f"--name={self.name}")
        found.append("--initial-cluster=" + ",".join(f"{n}=https://{self.host}:{p}" for n, p in members.items()))
        for side in ("", "peer-"):
            found += [f"--{side}cert-file={self.own.certificate}", f"--{side}key-file={self.own.key}"]
        found += [f"--peer-trusted-ca-file={self.authority}", "--peer-client-cert-auth"]
        return found + [f"--trusted-ca-file={self.authority}", "--client-cert-auth"] * self.asks_clients


def enable_authentication(config: EtcdConfig, password: str, users: Mapping[str, str] = {}) -> None:
    """Require passwords; each user may read and write one prefix. All have the same password, as has root."""
    tls = ["--cacert", config.ca_cert, "--cert", config.ssl_cert, "--key", config.ssl_cert_key] if config.tls else []
    scheme = "https" if config.tls else "http"
    endpoints = ",".join(f"{scheme}://{endpoint}" for endpoint in config.endpoints)

    def etcdctl(*words: str, given: str = "") -> None:
        command = ["etcdctl", f"--endpoints={endpoints}", f"--command-timeout={_SECONDS:.0f}s", *map(str, tls), *words]
        environment = {**os.environ, "ETCDCTL_API": "3"}
        done = subprocess.run(command, input=given, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    for user in ("root", *users):
        etcdctl("user", "add", user, "--interactive=false", given=password)
        etcdctl("role", "add", user)
        etcdctl("user", "grant-role", user, user)
    for user, prefix in users.items():
        etcdctl("role", "grant-permission", user, "--prefix=true", "readwrite", prefix)
    etcdctl("auth", "enable")


class Cluster:
    """Members that need a certificate from each client, and know the users root, trainer and other."""

    def __init__(self, directory: Path, binary: Path, size: int = 3, host: str = "127.0.0.1") -> None:
        self.directory = directory
        self.authority = Authority(directory)
        own, client = self.authority.issue("member", host, "localhost"), self.authority.issue("client")
        for attempt in range(1, _ATTEMPTS + 1):
            self.members = [SecuredServer(directory / f"{attempt}-{n}", host=host, binary=binary) for n in range(size)]
            for number, member in enumerate(self.members):
                member.authority, member.own, member.name = self.authority.own.certificate, own, f"member{number}"
            for member in self.members:
                member.cluster = {other.name: other.peer_port for other in self.members}
            try:
                self.start()
                break
            except EtcdServerError:
                # Another process may have taken a port meanwhile.
                self.stop()
                if attempt == _ATTEMPTS:
                    raise
        self.anonymous = EtcdConfig(
            tuple(member.config.endpoints[0] for member in self.members),
            tls=True,
            ca_cert=self.authority.own.certificate,
            ssl_cert=client.certificate,
            ssl_cert_key=client.key,
        )
        password = secrets.token_hex()
        enable_authentication(self.anonymous, password, {"trainer": self.anonymous.prefix, "other": "/other/"})
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
