"""A real etcd for every test here, and the ways to disturb it."""

from __future__ import annotations

import itertools
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_elastic.rendezvous.etcd import EtcdClient, EtcdServer
from slurm_elastic.rendezvous.etcd.machine import free_port
from tests.local.etcd.proxy import Proxy

_SECOND_ETCD = Path("/opt/slurm-elastic/trixie/usr/bin/etcd")
_names = itertools.count()


def _binaries() -> list[Path]:
    in_path = [shutil.which("etcd", path=directory) for directory in os.get_exec_path()]
    second = [str(_SECOND_ETCD)] if os.access(_SECOND_ETCD, os.X_OK) else []
    return [Path(name) for name in dict.fromkeys(os.path.realpath(name) for name in in_path if name)] + [
        Path(name) for name in second
    ]


@pytest.fixture(scope="session", params=_binaries() or [Path("etcd")], ids=str)
def binary(request: pytest.FixtureRequest) -> Path:
    """Each etcd that is installed."""
    return request.param


@pytest.fixture(scope="session")
def last_binary() -> Path:
    """The newest etcd that is installed. The agents' tests and those on a cluster have members of the first."""
    return (_binaries() or [Path("etcd")])[-1]


@pytest.fixture(scope="session")
def etcd(binary: Path) -> Iterator[EtcdServer]:
    """One etcd without TLS and authentication, shared by the tests that do it no harm."""
    with EtcdServer(binary=binary) as server:
        yield server


@pytest.fixture(scope="session")
def first_etcd() -> Iterator[EtcdServer]:
    """The same for tests of what lies above the API, which do not have to be done with each etcd."""
    with EtcdServer() as server:
        yield server


@pytest.fixture
def own_etcd(binary: Path) -> Iterator[EtcdServer]:
    """An etcd that the test may stop, fill up, or lock."""
    with EtcdServer(binary=binary) as server:
        yield server


@pytest.fixture
def lone_etcd() -> Iterator[EtcdServer]:
    """The same for tests of what lies above the API. It comes back where it was."""
    with EtcdServer(client_port=free_port(), peer_port=free_port()) as server:
        yield server


@pytest.fixture
def client(etcd: EtcdServer) -> Iterator[EtcdClient]:
    with EtcdClient(etcd.config) as client:
        yield client


@pytest.fixture
def prefix() -> str:
    """A prefix that no other test of this run uses."""
    return f"/slurm-elastic/test-{os.getpid()}-{next(_names)}/"


@pytest.fixture
def proxy(etcd: EtcdServer) -> Iterator[Proxy]:
    with Proxy(etcd.config.endpoints[0]) as proxy:
        yield proxy


@pytest.fixture
def warnings() -> Iterator[list[str]]:
    """The lines that a person would see; grows while the test runs."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("slurm_elastic")
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)
