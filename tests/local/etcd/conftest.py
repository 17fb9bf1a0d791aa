"""A real etcd for every test here, and the ways to disturb it."""

from __future__ import annotations

import itertools
import logging
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from slurm_elastic.rendezvous.records.etcd import failover_channel
from slurm_elastic.rendezvous.records.etcd.client import EtcdClient
from slurm_elastic.rendezvous.records.etcd.config import Endpoint
from slurm_elastic.rendezvous.records.etcd.server import EtcdServer
from tests.local.etcd.helpers.proxy import Proxy

_OTHER_ROOTS = [Path("/opt/slurm-elastic/forky"), Path("/opt/slurm-elastic/trixie")]
"""Where `.ci/setup --release` puts other releases of Debian, the newest first."""
_names = itertools.count()


def _binaries() -> list[Path]:
    in_path = [shutil.which("etcd", path=directory) for directory in os.get_exec_path()]
    others = [str(root / "usr/bin/etcd") for root in _OTHER_ROOTS]
    second = [name for name in others if os.access(name, os.X_OK)][:1]
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
def lone_etcd() -> Iterator[EtcdServer]:
    """An etcd that the test may stop, fill up, or lock. It comes back where it was."""
    with EtcdServer() as server:
        yield server


@pytest.fixture
def dead_endpoint() -> Iterator[Callable[[], Endpoint]]:
    """Make an endpoint at which no process listens, and no other process can: its port is bound."""
    with ExitStack() as stack:

        def bind() -> Endpoint:
            bound = stack.enter_context(socket.socket())
            bound.bind(("127.0.0.1", 0))
            return Endpoint(*bound.getsockname())

        yield bind


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine is no outage."""
    monkeypatch.setattr(failover_channel, "OUTAGE_SECONDS", 30.0)


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
