from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from torch.distributed.elastic.rendezvous.api import (
    RendezvousConnectionError,
    RendezvousParameters,
    RendezvousStateError,
)
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from slurm_elastic.errors import UsageError
from slurm_elastic.rendezvous.records.etcd.client import EtcdClient
from slurm_elastic.rendezvous.records.etcd.server import EtcdServer
from slurm_elastic.rendezvous.records.etcd.store import EtcdV3RendezvousBackend, create_backend, create_handler
from tests.local.agents import eventually
from tests.local.etcd.helpers.proxy import Proxy
from tests.local.etcd.test_client import revoke
from tests.local.waiting import meanwhile

REPOSITORY = Path(__file__).parents[3]
GUARD = 300.0


@pytest.fixture
def etcd(first_etcd: EtcdServer) -> EtcdServer:
    """What is tested here lies above the API."""
    return first_etcd


@pytest.fixture(autouse=True)
def open_etcd(monkeypatch: pytest.MonkeyPatch) -> None:
    """The etcd of these tests asks for neither a user nor a certificate."""
    monkeypatch.setenv("SLURM_ELASTIC_ETCD_OPEN", "1")


@pytest.fixture
def backend(client: EtcdClient, prefix: str) -> EtcdV3RendezvousBackend:
    return EtcdV3RendezvousBackend(client, prefix)


def parameters(endpoint: str, run_id: str = "run", **options: object) -> RendezvousParameters:
    return RendezvousParameters("etcd-v3", endpoint, run_id, 1, 1, local_addr="127.0.0.1", **options)


# These are what torch's own tests ask of any backend: RendezvousBackendTestMixin in
# test/distributed/elastic/rendezvous/rendezvous_backend_test.py, torch 2.13.


def test_set_state_sets_backend_state_if_token_is_valid(backend: EtcdV3RendezvousBackend) -> None:
    _, first, has_set_first = backend.set_state(b"x") or (None, None, None)
    state, second, has_set_second = backend.set_state(b"y", first) or (None, None, None)
    assert state == b"y"
    assert first != second
    assert has_set_first
    assert has_set_second
    assert backend.get_state() == (b"y", second)


@pytest.mark.parametrize("token", [None, "invalid", object(), True, 1, -1, 2**62])
def test_set_state_returns_backend_state_if_token_is_invalid(backend: EtcdV3RendezvousBackend, token: object) -> None:
    before = backend.set_state(b"x")
    assert before is not None
    assert backend.set_state(b"y", token) == (*before[:2], False)


@pytest.mark.parametrize("token", ["invalid", 7])
def test_set_state_returns_none_if_token_is_invalid_and_there_is_no_state(
    backend: EtcdV3RendezvousBackend, token: object
) -> None:
    assert backend.set_state(b"y", token) is None
    assert backend.get_state() is None


def test_a_state_that_is_corrupt_is_an_error(backend: EtcdV3RendezvousBackend, client: EtcdClient, prefix: str) -> None:
    client.put(prefix + "state", b"corrupt")
    with pytest.raises(RendezvousStateError):
        backend.get_state()
    for token in (None, "invalid"):
        with pytest.raises(RendezvousStateError):
            backend.set_state(b"x", token)


# What torch's tests do not ask, and etcd makes possible.


def test_state_lives_under_the_run_s_lease(
    etcd: EtcdServer, backend: EtcdV3RendezvousBackend, client: EtcdClient, prefix: str
) -> None:
    backend.set_state(b"x")
    found = client.get(prefix + "state")
    assert found is not None
    assert found.lease == backend.lease.id
    with EtcdClient(etcd.config) as other:
        assert EtcdV3RendezvousBackend(other, prefix).lease.id == backend.lease.id
        assert EtcdV3RendezvousBackend(other, prefix + "2").lease.id != backend.lease.id


def test_set_state_whose_answer_was_lost_says_that_it_was_set(
    etcd: EtcdServer, client: EtcdClient, proxy: Proxy, prefix: str
) -> None:
    with EtcdClient(proxy.config) as far:
        backend = EtcdV3RendezvousBackend(far.limited(GUARD), prefix)
        proxy.mute()
        with meanwhile(lambda: backend.set_state(b"x")) as results:
            eventually(lambda: client.get(prefix + "state"))
            proxy.cut()
            proxy.mend()
        assert results == [(*(backend.get_state() or ()), True)]


def test_state_is_written_again_after_the_lease_was_lost(backend: EtcdV3RendezvousBackend, client: EtcdClient) -> None:
    backend.set_state(b"x")
    revoke(client, backend.lease)
    assert backend.get_state() is None
    assert (backend.set_state(b"y") or ())[0] == b"y"


def test_lost_etcd_is_a_connection_error(lone_etcd: EtcdServer, prefix: str) -> None:
    with EtcdClient(lone_etcd.config) as client:
        backend = EtcdV3RendezvousBackend(client.limited(0.3), prefix)
        lone_etcd.kill()
        with pytest.raises(RendezvousConnectionError, match="no etcd member"):
            backend.get_state()
        with pytest.raises(RendezvousConnectionError, match="no etcd member"):
            backend.set_state(b"x")


def test_runs_do_not_see_each_other(etcd: EtcdServer) -> None:
    with ExitStack() as stack:
        pairs = [create_backend(parameters(str(etcd.config), run)) for run in ("a", "a/torch", "b")]
        for backend, _ in pairs:
            stack.callback(backend.client.close)
        for number, (backend, store) in enumerate(pairs):
            assert backend.set_state(b"%d" % number) is not None
            store.set("key", str(number))
        for number, (backend, store) in enumerate(pairs):
            assert (backend.get_state() or ())[0] == b"%d" % number
            assert store.get("key") == b"%d" % number


def test_bad_options_are_told_in_one_line(etcd: EtcdServer) -> None:
    for options, words in (
        ({"read_timeout": 0}, "read_timeout"),
        ({"password": "secret"}, "every user of the node"),
        ({"ca_cert": "/no/such/file"}, "/no/such/file"),
        ({"protocol": "ftp"}, "http or https"),
        ({"protocol": "https"}, "does not speak TLS"),
    ):
        with pytest.raises(UsageError, match=words):
            create_handler(parameters(str(etcd.config.endpoints[0]), **options))


def test_errors_are_those_of_torch_s_backend(etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint = str(etcd.config.endpoints[0])
    with pytest.raises(ValueError, match="http or https"):
        create_handler(parameters(endpoint, protocol="ftp"))

    def unknown(*_: object, **__: object) -> object:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(RendezvousConnectionError, match="there is no host of this name"):
        create_handler(parameters("no-such-host.invalid:2379", read_timeout=5))


def test_torch_finds_the_handler(etcd: EtcdServer, prefix: str) -> None:
    handler = get_rendezvous_handler(parameters(str(etcd.config), prefix))
    try:
        assert handler.get_backend() == "etcd-v3"
        info = handler.next_rendezvous()
        assert (info.rank, info.world_size) == (0, 1)
        assert handler.shutdown()
    finally:
        handler._state_holder._backend.client.close()


TRAINING = """
import os
print("RESULT", os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ.get("PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION"))
"""


def test_an_etcd_for_everybody_is_refused(etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_ELASTIC_ETCD_OPEN")
    with pytest.raises(UsageError, match=r"torch unpickles it.*give it a user or a client certificate, or set SLURM_"):
        create_backend(parameters(str(etcd.config)))


def test_two_agents_of_torchrun_meet(first_etcd: EtcdServer, tmp_path: Path, prefix: str) -> None:
    (tmp_path / "train.py").write_text(TRAINING)
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    environment.pop("PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION", None)
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"),
        *("--rdzv-backend=etcd-v3", f"--rdzv-endpoint={first_etcd.config}", f"--rdzv-id={Path(prefix).name}"),
        *("--local-addr=127.0.0.1", str(tmp_path / "train.py")),
    ]
    agents = [
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            start_new_session=True,
        )
        for _ in range(2)
    ]
    try:
        outputs = [agent.communicate(timeout=GUARD)[0] for agent in agents]
    finally:
        for agent in agents:
            if agent.poll() is None:
                os.killpg(agent.pid, signal.SIGKILL)
                agent.wait()
    assert [agent.returncode for agent in agents] == [0, 0], outputs
    results = sorted(re.findall(r"RESULT (.*)", "".join(outputs)))
    assert results == ["0 2 None", "1 2 None"]
