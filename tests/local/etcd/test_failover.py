from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from slurm_elastic.rendezvous.records.etcd import EtcdClient, EtcdServer, EventKind, Watch, failover_channel
from slurm_elastic.rendezvous.records.etcd.store import EtcdStore
from tests.local.agents import eventually
from tests.local.etcd.cluster import Cluster
from tests.local.etcd.processes import stopped
from tests.local.etcd.proxy import Proxy

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
    endpoint = client._connection.member().endpoint
    return next(member for member in cluster.members if member.config.endpoints[0] == endpoint)


def write_and_read(client: EtcdClient, key: str, value: bytes) -> None:
    client.put(key, value)
    found = client.get(key)
    assert found is not None
    assert found.value == value


def wait_until_told(watch: Watch, value: bytes) -> None:
    """A put whose answer was lost with its member is sent, and told, twice."""
    last = None
    while last != value:
        events = watch.next(GUARD)
        assert events
        last = events[-1].value


@pytest.mark.usefixtures("_slow_members_are_there")
def test_each_member_killed_in_turn_costs_one_line_each(
    cluster: Cluster, client: EtcdClient, prefix: str, warnings: list[str]
) -> None:
    lease = client.lease(8)
    client.put(prefix + "leased", b"", lease.id)
    with client.watch(prefix + "watched") as watch:
        for number in range(3):
            lost = member_of(cluster, client)
            lost.kill()
            lost_at = time.monotonic()
            write_and_read(client, prefix + "watched", b"%d" % number)
            wait_until_told(watch, b"%d" % number)
            cluster.start()
            assert len(warnings) == number + 1
            assert str(lost.config.endpoints[0]) in warnings[number]
    eventually(lambda: lease.renewed_at > lost_at)
    assert client.get(prefix + "leased") is not None
    assert not lease.lost


def test_all_members_down_and_back_loses_nothing(
    cluster: Cluster, client: EtcdClient, prefix: str, warnings: list[str]
) -> None:
    lease = client.lease(8)
    client.put(prefix + "leased", b"", lease.id)
    with client.watch(prefix + "watched") as watch:
        cluster.stop()
        lost_at = time.monotonic()
        assert watch.next(1.0) == ()
        # The restart also forgets all tokens.
        back = threading.Timer(1.0, cluster.start)
        back.start()
        write_and_read(client, prefix + "watched", b"after")
        back.join()
        wait_until_told(watch, b"after")
    eventually(lambda: lease.renewed_at > lost_at)
    assert client.get(prefix + "leased") is not None
    assert not lease.lost
    assert len(warnings) <= 3, "one for each member at most"


def test_member_that_hangs_is_left(
    cluster: Cluster, client: EtcdClient, prefix: str, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failover_channel, "_ATTEMPT_SECONDS", 1.0)
    monkeypatch.setattr(failover_channel, "_OUTAGE_SECONDS", GUARD)
    hung = member_of(cluster, client)
    assert hung.pid is not None
    with stopped(hung.pid):
        write_and_read(client, prefix + "key", b"1")
        # Another may be too slow, too.
        assert len([line for line in warnings if f"member {hung.config.endpoints[0]} is lost" in line]) == 1


def test_what_a_member_has_lost_is_soon_asked_of_another(
    first_etcd: EtcdServer, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failover_channel, "_ATTEMPT_SECONDS", 600.0)
    here = first_etcd.config.endpoints[0]
    with Proxy(here) as proxy, EtcdClient(replace(first_etcd.config, endpoints=(proxy.endpoint, here))) as client:
        client._connection._position = 0
        client.connect()
        proxy.mute()
        write_and_read(client.limited(GUARD), prefix + "key", b"1")
        assert client._connection.member().endpoint == here


@pytest.mark.usefixtures("_slow_members_are_there")
def test_tokens_of_a_member_that_restarted_are_renewed(cluster: Cluster, prefix: str, warnings: list[str]) -> None:
    one = cluster.members[0]
    with EtcdClient(replace(cluster.config, endpoints=one.config.endpoints)) as client:
        client.put(prefix + "key", b"1")
        client._connection.member().token = "forgotten.1"
        write_and_read(client, prefix + "key", b"2")
        client._connection.member().token = "forgotten.1"
        with client.watch(prefix + "key") as watch:
            client._connection.member().token = "forgotten.2"
            client.put(prefix + "key", b"3")
            assert [event.kind for event in watch.next(GUARD)] == [EventKind.PUT]
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
        original = far._connection._attempt

        def mute_before_the_write(*arguments: object) -> object:
            request = arguments[3]
            if any(one.HasField("request_put") for one in getattr(request, "success", ())):
                far._connection._attempt = original
                proxy.mute()
            return original(*arguments)

        far._connection._attempt = mute_before_the_write
        worker.start()
        found = near.limited(GUARD).wait_for([f"{prefix}keys/key"])
        assert set(found.values()) == {once}
        proxy.cut()
        proxy.mend()
        worker.join()
        assert store.get("key") == once
        assert results in ([None], [int(once)] if once.isdigit() else [once])
