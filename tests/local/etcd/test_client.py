from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from contextlib import ExitStack

import pytest

from slurm_elastic.errors import SlurmElasticError
from slurm_elastic.rendezvous.records.api import RecordsInterruptedError
from slurm_elastic.rendezvous.records.etcd import failover_channel
from slurm_elastic.rendezvous.records.etcd.client import EtcdClient, Lease
from slurm_elastic.rendezvous.records.etcd.errors import EtcdError, EtcdUnavailableError
from slurm_elastic.rendezvous.records.etcd.failover_channel import load_rpc
from slurm_elastic.rendezvous.records.etcd.server import EtcdServer
from tests.local.agents import eventually
from tests.local.etcd.helpers.processes import stopped
from tests.local.waiting import meanwhile

GUARD = 20.0


def compact(client: EtcdClient, revision: int) -> None:
    request = load_rpc().etcd.CompactionRequest(revision=revision, physical=True)
    client.connection.call("KV/Compact", request, client.limits)


def revoke(client: EtcdClient, lease: Lease) -> None:
    request = load_rpc().etcd.LeaseRevokeRequest(ID=lease.id)
    client.connection.call("Lease/LeaseRevoke", request, client.limits)


def test_prefix_holds_its_keys_and_no_others(client: EtcdClient, prefix: str) -> None:
    for name in ("a", "b", "b\xff", "c"):
        client.put(prefix + name, name.encode())
    keys, revision = client.get_prefix(prefix + "b")
    assert [found.key for found in keys] == [(prefix + "b").encode(), (prefix + "b\xff").encode()]
    assert revision >= keys[-1].mod_revision
    assert client.count_prefix(prefix) == 4
    assert client.delete(prefix + "b", prefix=True) == 2
    assert client.delete(prefix + "b") == 0


@pytest.mark.parametrize("disturbance", ["gone", "hung"])
def test_interrupt_hook_ends_every_wait(
    lone_etcd: EtcdServer, prefix: str, disturbance: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_FIRST_SECONDS", "ATTEMPT_SECONDS"):
        monkeypatch.setattr(failover_channel, name, 600.0)
    interrupted = threading.Event()
    with EtcdClient(lone_etcd.config) as client, ExitStack() as stack:
        client.connect()
        hooked = client.limited(600.0, interrupted.is_set)
        if disturbance == "gone":
            lone_etcd.kill()
        else:
            assert lone_etcd.pid is not None
            stack.enter_context(stopped(lone_etcd.pid))
        with meanwhile(interrupted.set, after=0.05), pytest.raises(RecordsInterruptedError):
            hooked.get(prefix)


def test_interrupt_hook_ends_the_look_at_an_endpoint(lone_etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch) -> None:
    lone_etcd.kill()
    interrupted, over = threading.Event(), threading.Event()

    def hang(*_: object) -> None:
        # As a name server that does not answer.
        interrupted.set()
        assert over.wait(GUARD)

    monkeypatch.setattr(failover_channel.errors, "probe_endpoint", hang)
    try:
        with EtcdClient(lone_etcd.config) as client, pytest.raises(RecordsInterruptedError):
            client.limited(600.0, interrupted.is_set).connect()
        assert not over.is_set()
    finally:
        over.set()


def test_a_shared_lease_lives_past_its_ttl_and_its_keys_die_with_the_last_client(
    etcd: EtcdServer, client: EtcdClient, prefix: str
) -> None:
    key = prefix + "shared"
    with EtcdClient(etcd.config) as stays:
        kept = stays.shared_lease(prefix, 3)
        with EtcdClient(etcd.config) as goes:
            assert goes.shared_lease(prefix, 3).id == kept.id
            goes.put(key, b"1", kept.id)
        time.sleep(kept.ttl + 0.7)
        assert client.get(key) is not None
    eventually(lambda: client.get(key) is None)


def test_a_watch_from_before_a_compaction_ends(client: EtcdClient, prefix: str) -> None:
    revision = client.put(prefix, b"")
    compact(client, client.put(prefix, b""))
    began = time.monotonic()
    client.await_put(f"{prefix}never".encode(), revision - 1, began + GUARD)
    assert time.monotonic() - began < GUARD


def test_client_that_is_closed_says_so(first_etcd: EtcdServer) -> None:
    with EtcdClient(first_etcd.config) as client:
        client.connect()
    client.await_put(b"key", 1, time.monotonic() + GUARD)
    with pytest.raises(EtcdError, match="is closed"):
        client.connect()


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
from slurm_elastic.rendezvous.records.etcd.client import EtcdClient
from slurm_elastic.rendezvous.records.etcd.config import load_config
client = EtcdClient(load_config({str(first_etcd.config)!r}))
client.shared_lease({prefix!r}, 5)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_proxy_of_a_site_is_for_the_world_outside(first_etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    with EtcdClient(first_etcd.config) as client:
        client.limited(GUARD).connect()


def test_calls_to_an_etcd_that_is_gone_end_in_time(
    lone_etcd: EtcdServer, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failover_channel, "OUTAGE_SECONDS", 0.4)
    with EtcdClient(lone_etcd.config) as client:
        client.connect()
        lone_etcd.kill()
        with pytest.raises(EtcdUnavailableError, match="answered in time"):
            client.limited(0.2).get("/x")
        assert warnings == [], "the error itself is the one line"
        for _ in range(2):
            with pytest.raises(EtcdUnavailableError, match="answered in time"):
                client.limited(0.6).get("/x")
    assert len(warnings) == 1
