from __future__ import annotations

import http.server
import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slurm_elastic.errors import ExitCode, UsageError
from slurm_elastic.rendezvous.records.etcd.client import EtcdClient
from slurm_elastic.rendezvous.records.etcd.config import Endpoint, EtcdConfig
from slurm_elastic.rendezvous.records.etcd.errors import (
    EtcdAuthenticationError,
    EtcdEndpointError,
    EtcdError,
    EtcdNoSpaceError,
    EtcdPermissionError,
    EtcdUnavailableError,
)
from slurm_elastic.rendezvous.records.etcd.server import EtcdServer
from slurm_elastic.rendezvous.records.etcd.store import EtcdStore
from tests.local.etcd.helpers.cluster import Authority, Cluster, SecuredServer, enable_authentication


@pytest.fixture(scope="module")
def secured(binary: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("secured"), binary, size=1)
    yield cluster
    cluster.stop()


@contextmanager
def http_server(content: object) -> Iterator[Endpoint]:
    """Something that speaks HTTP/1.1 and tells a version, as an etcd does."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(content).encode())

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield Endpoint(*server.server_address[:2])
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def banner_server() -> Iterator[Endpoint]:
    """Something that talks first and hangs up, as an SSH server does to strangers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield Endpoint(*listener.getsockname())
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def refusal(config: EtcdConfig, timeout: float = 30.0) -> EtcdError:
    """Return the error that a client ends with; it must be one line and must not tell the password."""
    with EtcdClient(config) as client, pytest.raises(EtcdError) as caught:
        client.limited(timeout).connect()
    message = str(caught.value)
    assert "\n" not in message
    assert config.password is None or config.password not in message + repr(config)
    return caught.value


PASSWORD = "SLURM_ELASTIC_ETCD_PASSWORD"
PLAIN = {"tls": False, **dict.fromkeys(("ca_cert", "ssl_cert", "ssl_cert_key", "user", "password"))}


@pytest.mark.parametrize(
    ("foreign", "words"),
    [
        (http_server({"hello": "world"}), "something else than etcd answers at ADDRESS.*2379"),
        (banner_server(), "something else than etcd answers at ADDRESS"),
        (http_server({"etcdserver": "2.3.8", "etcdcluster": "2.3.0"}), "etcd 2.3.8.*needs etcd 3.4 or later"),
    ],
    ids=["a web server", "an SSH server", "an etcd with v2 only"],
)
def test_the_port_of_something_else(warnings: list[str], foreign: AbstractContextManager[Endpoint], words: str) -> None:
    with foreign as endpoint:
        error = refusal(EtcdConfig((endpoint,)))
    assert (type(error), error.exit_code) == (EtcdEndpointError, ExitCode.USAGE)
    assert re.search(words.replace("ADDRESS", str(endpoint)), str(error))
    assert warnings == [], "the error itself is the one line"


@pytest.mark.parametrize(
    ("fields", "kind", "words"),
    [
        (PLAIN, EtcdEndpointError, "write etcds://"),
        ({"ssl_cert": None, "ssl_cert_key": None}, EtcdEndpointError, "ssl_cert and ssl_cert_key"),
        ({"password": "not-the-password"}, EtcdAuthenticationError, "password of user 'trainer'"),
        # etcd takes the certificate's common name for a user's.
        ({"user": None, "password": None}, EtcdPermissionError, PASSWORD),
        ({"user": "other"}, EtcdPermissionError, "user 'other'.*/slurm-elastic/.*grant-permission"),
    ],
    ids=["no TLS", "no client certificate", "a wrong password", "a certificate without a user", "another user"],
)
def test_members_with_tls_and_passwords_refuse(
    secured: Cluster, fields: dict[str, Any], kind: type[EtcdError], words: str
) -> None:
    error = refusal(replace(secured.config, **fields))
    assert type(error) is kind
    assert re.search(words, str(error))


@pytest.mark.parametrize(
    ("fields", "kind", "words"),
    [
        ({"tls": True}, EtcdEndpointError, "write etcd:// instead of etcds://"),
        ({"user": "trainer", "password": "some-password"}, EtcdAuthenticationError, "has no authentication"),
    ],
    ids=["TLS", "a password"],
)
def test_a_member_without_both_refuses(
    etcd: EtcdServer, fields: dict[str, Any], kind: type[EtcdError], words: str
) -> None:
    error = refusal(replace(etcd.config, **fields))
    assert type(error) is kind
    assert words in str(error)


def test_certificate_for_another_host(binary: Path, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    server = SecuredServer(tmp_path / "etcd", binary=binary)
    server.asks_clients = False
    server.authority, server.own = authority.own.certificate, authority.issue("elsewhere", "elsewhere.example")
    server.launch()
    try:
        error = refusal(server.config)
    finally:
        server.kill()
    assert isinstance(error, EtcdEndpointError)
    assert "not valid for '127.0.0.1'" in str(error)


def test_no_password_where_one_is_asked_for(lone_etcd: EtcdServer) -> None:
    enable_authentication(lone_etcd.config, "some-password")
    error = refusal(lone_etcd.config)
    assert isinstance(error, EtcdAuthenticationError)
    assert PASSWORD in str(error)


def fill(client: EtcdClient, key: str) -> None:
    while True:
        client.put(key, b"x" * 100_000)


def test_full_database(binary: Path, prefix: str) -> None:
    with (
        EtcdServer(binary=binary, arguments=["--quota-backend-bytes=1000000"]) as server,
        EtcdClient(server.config) as client,
    ):
        store = EtcdStore(client, prefix)
        store.set("kept", "value")
        with pytest.raises(EtcdNoSpaceError) as caught:
            fill(client, prefix + "fill")
        assert "NOSPACE" in str(caught.value)
        assert "alarm disarm" in str(caught.value)
        with pytest.raises(RuntimeError, match="NOSPACE"):
            store.set("lost", "value")
        assert isinstance(refusal(server.config), EtcdNoSpaceError)
        assert store.get("kept") == b"value"
        assert store.delete_key("kept")


def test_list_with_a_dead_member_costs_one_line(
    etcd: EtcdServer, prefix: str, warnings: list[str], dead_endpoint: Callable[[], Endpoint]
) -> None:
    dead = dead_endpoint()
    config = replace(etcd.config, endpoints=(dead, *etcd.config.endpoints))
    lost = 0
    while not lost:  # Where a client begins in the list is chance.
        with EtcdClient(config) as client:
            lost = int(client.connection.endpoint == dead)
            client.connect()
            for number in range(5):
                client.put(f"{prefix}{number}", b"")
        assert len(warnings) == lost


def test_a_list_with_something_else_in_it_is_no_mistake(etcd: EtcdServer) -> None:
    with http_server({"hello": "world"}) as other:
        for _ in range(8):  # Where a client begins in the list is chance.
            with EtcdClient(replace(etcd.config, endpoints=(other, *etcd.config.endpoints))) as client:
                client.connect()


def test_no_member_there(dead_endpoint: Callable[[], Endpoint]) -> None:
    config = EtcdConfig((dead_endpoint(), dead_endpoint()))
    error = refusal(config, timeout=1.0)
    assert isinstance(error, EtcdUnavailableError)
    assert not isinstance(error, UsageError)
    assert "connection refused" in str(error)
    assert "check that etcd runs" in str(error)


def test_name_that_nobody_knows(monkeypatch: pytest.MonkeyPatch, dead_endpoint: Callable[[], Endpoint]) -> None:
    def unknown(*_: object, **__: object) -> object:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    endpoint = dead_endpoint()
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    error = refusal(EtcdConfig((endpoint,)))
    assert isinstance(error, EtcdEndpointError)
    assert f"{endpoint}: there is no host of this name; check the endpoint" in str(error)


def test_value_too_large_for_etcd(client: EtcdClient, prefix: str) -> None:
    with pytest.raises(EtcdError, match="too large"):
        client.put(prefix, b"x" * 2_000_000)
