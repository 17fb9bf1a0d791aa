from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from slurm_elastic.rendezvous.records.etcd import failover_channel
from slurm_elastic.rendezvous.records.etcd.client import EtcdClient
from slurm_elastic.rendezvous.records.etcd.errors import EtcdEndpointError
from slurm_elastic.rendezvous.records.etcd.failover_channel import Limits
from slurm_elastic.rendezvous.records.etcd.server import EtcdServer
from slurm_elastic.rendezvous.records.etcd.store import EtcdStore
from tests.local.agents import eventually
from tests.local.etcd.helpers.cluster import Authority, Cluster
from tests.local.etcd.helpers.processes import stopped
from tests.local.etcd.helpers.proxy import Proxy
from tests.local.waiting import meanwhile

GUARD = 30.0


@pytest.fixture(scope="module")
def whole_cluster(last_binary: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("cluster"), last_binary)
    yield cluster
    cluster.stop()


@pytest.fixture
def cluster(whole_cluster: Cluster) -> Iterator[Cluster]:
    """Three members, all there at the beginning of each test."""
    yield whole_cluster
    whole_cluster.start()


@pytest.fixture
def client(cluster: Cluster) -> Iterator[EtcdClient]:
    with EtcdClient(cluster.config) as client:
        client.connect()
        yield client.limited(GUARD)


@pytest.fixture
def prefix(cluster: Cluster, prefix: str) -> str:
    assert prefix.startswith(cluster.config.prefix)
    return prefix


def member_of(cluster: Cluster, client: EtcdClient) -> EtcdServer:
    endpoint = client.connection.endpoint
    return next(member for member in cluster.members if member.config.endpoints[0] == endpoint)


def write_and_read(client: EtcdClient, key: str, value: bytes) -> None:
    client.put(key, value)
    assert client.get_present([key])[0] == {key.encode(): value}


@pytest.fixture
def store(client: EtcdClient, prefix: str) -> Iterator[EtcdStore]:
    """With a lease beside it that is to outlive what the test does, and its key."""
    renewals: list[float] = []
    lease = client.shared_lease(prefix, 8, lambda silence: None if silence else renewals.append(time.monotonic()))
    lease.grant(client.limits)
    client.put(prefix + "leased", b"", lease.id)
    yield EtcdStore(client, prefix + "store/", timedelta(seconds=GUARD))
    over = time.monotonic()
    eventually(lambda: renewals[-1:] > [over])
    assert client.get(prefix + "leased") is not None


def test_each_member_killed_in_turn_costs_one_line_each(
    cluster: Cluster, client: EtcdClient, store: EtcdStore, warnings: list[str]
) -> None:
    for number in range(3):
        key = f"awaited{number}"
        with meanwhile(partial(store.get, key)) as found:
            lost = member_of(cluster, client)
            lost.kill()
            store.set(key, str(number))
        assert found == [b"%d" % number]
        cluster.start()
        assert len(warnings) == number + 1
        assert str(lost.config.endpoints[0]) in warnings[number]


def test_a_loss_that_several_threads_notice_is_one_line(client: EtcdClient, warnings: list[str]) -> None:
    lost, other, _ = client.config.endpoints
    for _ in range(2):
        client.connection._note_answer(other, {lost: "killed"})
    assert warnings == [f"etcd member {lost} is lost (killed); going on with the others"]


def test_a_watch_of_a_member_that_goes_has_no_answer(cluster: Cluster, client: EtcdClient, prefix: str) -> None:
    member_of(cluster, client).kill()
    client.await_put(f"{prefix}never".encode(), 1, time.monotonic() + GUARD)
    write_and_read(client, prefix + "after", b"1")


def test_all_members_down_and_back_loses_nothing(cluster: Cluster, store: EtcdStore, warnings: list[str]) -> None:
    with meanwhile(lambda: store.get("awaited")) as found:
        cluster.stop()
        # The restart also forgets all tokens.
        with meanwhile(cluster.start, after=1.0):
            store.set("awaited", "after")
    assert found == [b"after"]
    assert len(warnings) <= 3, "one for each member at most"


def test_member_that_hangs_is_left(cluster: Cluster, prefix: str) -> None:
    with EtcdClient(cluster.config) as client:
        client.connect()
        hung = member_of(cluster, client)
        assert hung.pid is not None
        with stopped(hung.pid):
            write_and_read(client.limited(GUARD), prefix + "key", b"1")
            assert member_of(cluster, client) is not hung


def test_a_mistake_at_all_members_is_one_line(
    cluster: Cluster, tmp_path: Path, warnings: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    stranger = Authority(tmp_path, "stranger")
    config = replace(cluster.config, ca_cert=stranger.own.certificate)
    with EtcdClient(config) as client, pytest.raises(EtcdEndpointError, match=r"certificate is not accepted.*ca_cert"):
        client.connect()
    assert warnings == []
    assert capfd.readouterr().err == "", "gRPC's core writes by itself unless told not to"


def test_what_a_member_has_lost_is_soon_asked_of_another(
    first_etcd: EtcdServer, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failover_channel, "ATTEMPT_SECONDS", 600.0)
    here = first_etcd.config.endpoints[0]
    with Proxy(here) as proxy, ExitStack() as stack:
        config = replace(first_etcd.config, endpoints=(proxy.endpoint, here))
        client = stack.enter_context(EtcdClient(config))
        # A client begins at any member of the list.
        while client.connection.endpoint != proxy.endpoint:
            client = stack.enter_context(EtcdClient(config))
        client.connect()
        proxy.mute()
        write_and_read(client.limited(GUARD), prefix + "key", b"1")
        assert client.connection.endpoint == here


def test_tokens_of_a_member_that_restarted_are_renewed(cluster: Cluster, prefix: str, warnings: list[str]) -> None:
    one = cluster.members[0]
    with EtcdClient(replace(cluster.config, endpoints=one.config.endpoints)) as client:
        client.put(prefix + "key", b"1")
        client.connection.token = "forgotten.1"
        write_and_read(client, prefix + "key", b"2")
        client.connection.token = "forgotten.1"
        store = EtcdStore(client, prefix + "store/", timedelta(seconds=GUARD))
        with meanwhile(lambda: store.set("other", "3"), after=0.2):
            client.connection.token = "forgotten.2"
            assert store.get("other") == b"3"
    assert warnings == []


@pytest.mark.parametrize(
    ("once", "operation"),
    [
        (b"5", lambda store: store.add("key", 5)),
        (b"more", lambda store: store.append("key", "more")),
        (b"new", lambda store: store.compare_set("key", "", "new")),
    ],
    ids=["add", "append", "compare_set"],
)
def test_operation_whose_answer_was_lost_is_done_once(
    first_etcd: EtcdServer, prefix: str, once: bytes, operation: Callable[[EtcdStore], object]
) -> None:
    with (
        Proxy(first_etcd.config.endpoints[0]) as proxy,
        EtcdClient(proxy.config) as far,
        EtcdClient(first_etcd.config) as near,
    ):
        store = EtcdStore(far, prefix)
        # One exchange first, so that the operation's own read is not what is lost.
        store.check(["key"])
        results: list[object] = []
        worker = threading.Thread(target=lambda: results.append(operation(store)))
        original = far.connection.call

        def mute_before_the_write(path: str, request: Any, limits: Limits) -> Any:
            if any(one.HasField("request_put") for one in getattr(request, "success", ())):
                far.connection.call = original  # type: ignore[method-assign]
                proxy.mute()
            return original(path, request, limits)

        far.connection.call = mute_before_the_write  # type: ignore[method-assign]
        worker.start()
        assert eventually(lambda: near.get(f"{prefix}keys/key")).value == once
        proxy.cut()
        proxy.mend()
        worker.join()
        assert store.get("key") == once
        assert results in ([None], [int(once)] if once.isdigit() else [once])
