from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import replace

import pytest

from slurm_elastic.errors import SlurmElasticError
from slurm_elastic.rendezvous.records.etcd import (
    Compare,
    Delete,
    EtcdClient,
    EtcdInterruptedError,
    EtcdLeaseLostError,
    EtcdServer,
    EtcdUnavailableError,
    Event,
    EventKind,
    Get,
    Put,
    Watch,
)
from slurm_elastic.rendezvous.records.etcd.config import EtcdTimes
from tests.local.agents import eventually
from tests.local.etcd.helpers.cluster import PATIENT
from tests.local.etcd.helpers.processes import stopped
from tests.local.etcd.helpers.proxy import Proxy

GUARD = 20.0


def compact(client: EtcdClient, revision: int) -> None:
    from slurm_elastic.rendezvous.records.etcd._stubs import load_rpc

    request = load_rpc().etcd.CompactionRequest(revision=revision, physical=True)
    client.connection.call("KV", "Compact", request, client.limits)


def take(watch: Watch, number: int) -> list[Event]:
    """So many events; etcd may tell several at once."""
    taken: list[Event] = []
    while len(taken) < number:
        events = watch.next(GUARD)
        assert events
        taken += events
    return taken


def test_keys_and_values_are_any_bytes(client: EtcdClient, prefix: str) -> None:
    key = prefix.encode() + b"\x00\xff\n"
    client.put(key, b"\xff\x00")
    found = client.get(key)
    assert found is not None
    assert (found.key, found.value, found.version) == (key, b"\xff\x00", 1)
    assert client.get(prefix + "other") is None


def test_prefix_holds_its_keys_and_no_others(client: EtcdClient, prefix: str) -> None:
    for name in ("a", "b", "b\xff", "c"):
        client.put(prefix + name, name.encode())
    keys, revision = client.get_prefix(prefix + "b")
    assert [found.key for found in keys] == [(prefix + "b").encode(), (prefix + "b\xff").encode()]
    assert revision >= keys[-1].mod_revision
    assert client.count_prefix(prefix) == 4
    assert client.delete(prefix + "b", prefix=True) == 2
    assert client.delete(prefix + "b") == 0


def test_transaction_writes_only_when_the_revision_is_as_compared(client: EtcdClient, prefix: str) -> None:
    key = prefix + "leader"
    first = client.transaction([Compare(key, 0)], [Put(key, b"one")], [Get(key)])
    assert first.succeeded
    second = client.transaction([Compare(key, 0)], [Put(key, b"two")], [Get(key)])
    assert not second.succeeded
    assert second.responses[0][0].value == b"one"
    third = client.transaction([Compare(key, first.revision)], [Delete(key), Put(prefix + "x", b"")])
    assert third.succeeded
    assert not third.retried
    assert client.get(key) is None


def test_watch_tells_every_change_in_order(client: EtcdClient, prefix: str) -> None:
    client.put(prefix + "old", b"1")
    with client.watch(prefix, prefix=True) as watch:
        assert [found.value for found in watch.initial] == [b"1"]
        for number in range(5):
            client.put(prefix + "new", b"%d" % number)
        client.delete(prefix + "old")
        seen = take(watch, 6)
    assert [event.value for event in seen] == [b"0", b"1", b"2", b"3", b"4", b""]
    assert seen[-1].kind is EventKind.DELETE


def test_watch_after_a_revision_tells_what_came_since(client: EtcdClient, prefix: str) -> None:
    revision = client.put(prefix + "a", b"1")
    client.put(prefix + "a", b"2")
    with client.watch(prefix, prefix=True, after_revision=revision) as watch:
        assert [found.value for found in watch.initial] == [b"1"]
        assert [event.value for event in watch.next(GUARD)] == [b"2"]


def test_watch_that_is_closed_brings_nothing_more(client: EtcdClient, prefix: str) -> None:
    watch = client.watch(prefix, prefix=True)
    watch.close()
    with client.watch(prefix, prefix=True) as other:
        client.put(prefix + "a", b"1")
        assert other.next(GUARD)
    assert watch.next(0.0) == ()


def test_watch_survives_a_broken_connection_and_compaction(
    client: EtcdClient, proxy: Proxy, prefix: str, warnings: list[str]
) -> None:
    client.put(prefix + "stays", b"1")
    client.put(prefix + "goes", b"1")
    with EtcdClient(replace(proxy.config, times=PATIENT)) as far, far.watch(prefix, prefix=True) as watch:
        client.put(prefix + "stays", b"2")
        assert [event.value for event in watch.next(GUARD)] == [b"2"]

        proxy.cut()
        client.put(prefix + "stays", b"3")
        proxy.mend()
        assert [event.value for event in watch.next(GUARD)] == [b"3"]

        proxy.cut()
        client.delete(prefix + "goes")
        client.put(prefix + "comes", b"4")
        client.put(prefix + "comes", b"5")
        compact(client, client.put(prefix + "stays", b"6"))
        proxy.mend()
        assert [(event.kind, event.key, event.value) for event in watch.next(GUARD)] == [
            (EventKind.DELETE, (prefix + "goes").encode(), b""),
            (EventKind.PUT, (prefix + "comes").encode(), b"5"),
            (EventKind.PUT, (prefix + "stays").encode(), b"6"),
        ]

        client.delete(prefix + "stays")
        assert [event.kind for event in watch.next(GUARD)] == [EventKind.DELETE]
    assert warnings == [], "a short cut that nobody has to know of"


def test_wait_for_returns_when_the_last_key_comes(client: EtcdClient, prefix: str) -> None:
    keys = [f"{prefix}{number}" for number in range(200)]
    for key in keys[:150]:
        client.put(key, b"early")
    writer = threading.Thread(target=lambda: [client.put(key, b"late") for key in keys[150:]])
    writer.start()
    found = client.limited(GUARD).wait_for(keys)
    writer.join()
    assert [found[key.encode()] for key in keys] == [b"early"] * 150 + [b"late"] * 50


def test_wait_for_goes_on_through_a_cut(client: EtcdClient, proxy: Proxy, prefix: str) -> None:
    with EtcdClient(proxy.config) as far:
        waiter = threading.Timer(0.0, lambda: found.update(far.limited(GUARD).wait_for([prefix + "key"])))
        found: dict[bytes, bytes] = {}
        waiter.start()
        eventually(lambda: bool(far.watches.subscriptions))
        proxy.cut()
        client.put(prefix + "key", b"there")
        compact(client, client.put(prefix + "other", b""))
        proxy.mend()
        waiter.join()
    assert found == {(prefix + "key").encode(): b"there"}


def test_wait_for_gives_up_at_its_time_limit(client: EtcdClient, prefix: str) -> None:
    with pytest.raises(TimeoutError):
        client.limited(0.05).wait_for([prefix + "never"])


@pytest.mark.parametrize("disturbance", ["gone", "hung", "hung and probed"])
def test_interrupt_hook_ends_every_wait(lone_etcd: EtcdServer, prefix: str, disturbance: str) -> None:
    interrupted = threading.Event()
    times = EtcdTimes(attempt=0.01 if disturbance == "hung and probed" else 600.0, probe=600.0)
    with EtcdClient(lone_etcd.config) as client, ExitStack() as stack:
        client.connect()
        hooked = client.limited(600.0, interrupted.is_set)
        watch = client.watch(prefix)
        client.connection.config = replace(lone_etcd.config, times=times)
        if disturbance == "gone":
            lone_etcd.kill()
        else:
            assert lone_etcd.pid is not None
            stack.enter_context(stopped(lone_etcd.pid))
        for wait in (
            lambda: hooked.get(prefix),
            lambda: hooked.wait_for([prefix + "never"]),
            lambda: watch.next(600.0, interrupted.is_set),
        ):
            interrupted.clear()
            timer = threading.Timer(0.05, interrupted.set)
            timer.start()
            with pytest.raises(EtcdInterruptedError):
                wait()
            timer.join()


def test_leases_live_past_their_ttl_and_keys_die_with_them(etcd: EtcdServer, client: EtcdClient, prefix: str) -> None:
    own, shared = prefix + "own", prefix + "shared"
    with EtcdClient(etcd.config) as stays, client.watch(prefix, prefix=True) as watch:
        lease = client.lease(3)
        client.put(own, b"1", lease.id)
        kept = stays.shared_lease(prefix, 3)
        with EtcdClient(etcd.config) as goes:
            assert goes.shared_lease(prefix, 3).id == kept.id
            goes.put(shared, b"1", kept.id)
        assert {event.key for event in take(watch, 2)} == {own.encode(), shared.encode()}

        assert watch.next(lease.ttl + 0.7) == ()
        assert not lease.lost
        client.end_lease(lease)
        stays.close()
        assert [(event.kind, event.key) for event in take(watch, 2)] == [
            (EventKind.DELETE, own.encode()),
            (EventKind.DELETE, shared.encode()),
        ]


def test_lease_that_ran_out_is_told(first_etcd: EtcdServer, prefix: str) -> None:
    with (
        Proxy(first_etcd.config.endpoints[0]) as proxy,
        EtcdClient(first_etcd.config) as client,
        EtcdClient(proxy.config) as far,
    ):
        lease = far.lease(3)
        far.put(prefix + "kept", b"1", lease.id)
        with client.watch(prefix, prefix=True) as watch:
            proxy.cut()
            assert [event.kind for event in watch.next(GUARD)] == [EventKind.DELETE]
        assert time.monotonic() > lease.renewed_at + lease.ttl
        proxy.mend()
        eventually(lambda: lease.lost)
        with pytest.raises(EtcdLeaseLostError):
            far.put(prefix + "kept", b"2", lease.id)


def test_client_in_a_forked_child_says_so(client: EtcdClient, prefix: str) -> None:
    client.put(prefix, b"")
    pid = os.fork()
    if pid == 0:
        try:
            client.get(prefix)
        except SlurmElasticError as error:
            os._exit(7 if "fork" in str(error) else 1)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


def test_process_with_an_open_client_ends_by_itself(first_etcd: EtcdServer, prefix: str) -> None:
    program = f"""
from slurm_elastic.rendezvous.records.etcd import EtcdClient, load_config
client = EtcdClient(load_config({str(first_etcd.config)!r}))
client.lease(5)
client.watch({prefix!r})
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_proxy_of_a_site_is_for_the_world_outside(first_etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    with EtcdClient(first_etcd.config) as client:
        client.limited(GUARD).connect()


def test_calls_to_an_etcd_that_is_gone_end_in_time(lone_etcd: EtcdServer, warnings: list[str]) -> None:
    with EtcdClient(replace(lone_etcd.config, times=EtcdTimes(outage=0.4))) as client:
        client.connect()
        lone_etcd.kill()
        with pytest.raises(EtcdUnavailableError, match="answered in time"):
            client.limited(0.2).get("/x")
        assert warnings == [], "the error itself is the one line"
        for _ in range(2):
            with pytest.raises(EtcdUnavailableError, match="answered in time"):
                client.limited(0.6).get("/x")
    assert len(warnings) == 1
