from __future__ import annotations

import gc
import multiprocessing
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import DistNetworkError, DistStoreError, HashStore, PrefixStore, Store, TCPStore

from slurm_elastic.rendezvous.records.etcd.client import EtcdClient
from slurm_elastic.rendezvous.records.etcd.config import load_config
from slurm_elastic.rendezvous.records.etcd.server import EtcdServer
from slurm_elastic.rendezvous.records.etcd.store import EtcdStore
from tests.local.etcd.helpers.proxy import Proxy
from tests.local.etcd.test_client import compact, revoke
from tests.local.waiting import meanwhile

GUARD = timedelta(seconds=30)
SHORT = timedelta(milliseconds=250)
"""More than etcd takes for any answer; who waits for what never comes waits so long."""


@pytest.fixture
def etcd(first_etcd: EtcdServer) -> EtcdServer:
    """What is tested here lies above the API."""
    return first_etcd


@pytest.fixture
def etcd_store(client: EtcdClient, prefix: str) -> EtcdStore:
    return EtcdStore(client, prefix, GUARD)


@pytest.fixture(params=["TCPStore", "HashStore", "EtcdStore", "PrefixStore(EtcdStore)"])
def store(request: pytest.FixtureRequest, etcd_store: EtcdStore) -> Store:
    """Each of these must do the same."""
    match request.param:
        case "TCPStore":
            return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=GUARD)
        case "HashStore":
            return HashStore()
        case "EtcdStore":
            return etcd_store
        case _:
            return PrefixStore("inner", etcd_store)


Step = tuple[str, tuple[Any, ...], Any]

STEPS: dict[str, list[Step]] = {
    "set and get": [
        ("set", ("key", "text"), None),
        ("get", ("key",), b"text"),
        ("set", ("key", "other"), None),
        ("get", ("key",), b"other"),
    ],
    "bytes": [
        ("set", ("key", b"\xff\x00\n"), None),
        ("get", ("key",), b"\xff\x00\n"),
        ("set", ("empty", ""), None),
        ("get", ("empty",), b""),
        ("set", ("umläut/a b%", "x"), None),
        ("get", ("umläut/a b%",), b"x"),
    ],
    "get of a key that never comes": [
        ("set_timeout", (SHORT,), None),
        ("get", ("none",), DistStoreError),
    ],
    "values of other types": [
        ("set", ("key", 5), TypeError),
        ("add", ("key", 1.5), TypeError),
        ("check", (["key"],), False),
    ],
    "add": [
        ("add", ("count", 3), 3),
        ("add", ("count", 4), 7),
        ("add", ("count", -9), -2),
        ("add", ("count", 0), -2),
        ("get", ("count",), b"-2"),
        ("set", ("number", "40"), None),
        ("add", ("number", 2), 42),
    ],
    "check": [
        ("check", (["a"],), False),
        ("set", ("a", "1"), None),
        ("check", (["a"],), True),
        ("check", (["a", "a"],), True),
        ("check", (["a", "b"],), False),
    ],
    "wait": [
        ("set", ("a", "1"), None),
        ("wait", (["a"],), None),
        ("wait", (["a"], GUARD), None),
        ("wait", (["a", "b"], SHORT), DistStoreError),
    ],
    "compare_set": [
        ("compare_set", ("key", "wrong", "new"), b"wrong"),
        ("check", (["key"],), False),
        ("compare_set", ("key", "", "first"), b"first"),
        ("compare_set", ("key", "", "second"), b"first"),
        ("compare_set", ("key", "wrong", "second"), b"first"),
        ("compare_set", ("key", "first", "second"), b"second"),
        ("get", ("key",), b"second"),
    ],
    "multi_set and multi_get": [
        ("multi_set", (["a", "b"], ["1", "2"]), None),
        ("multi_get", (["b", "a", "b"],), [b"2", b"1", b"2"]),
        ("multi_set", (["a", "a"], ["3", "4"]), None),
        ("get", ("a",), b"4"),
        ("set_timeout", (SHORT,), None),
        ("multi_get", (["a", "none"],), DistStoreError),
    ],
    "more keys than a transaction takes": [
        ("multi_set", ([f"k{n}" for n in range(300)], [str(n) for n in range(300)]), None),
        ("multi_get", ([f"k{n}" for n in range(300)],), [str(n).encode() for n in range(300)]),
        ("check", ([f"k{n}" for n in range(300)],), True),
    ],
    "append": [
        ("append", ("key", "a"), None),
        ("append", ("key", b"\xff"), None),
        ("get", ("key",), b"a\xff"),
    ],
    "delete_key": [
        ("delete_key", ("key",), False),
        ("set", ("key", "1"), None),
        ("delete_key", ("key",), True),
        ("check", (["key"],), False),
    ],
    "has_extended_api": [("has_extended_api", (), True)],
    # torch 2.11 has none.
    **(
        {"barrier": [("barrier", ("all", 1), None), ("barrier", ("both", 2, SHORT), DistStoreError)]}
        if hasattr(Store, "barrier")
        else {}
    ),
}


@pytest.mark.parametrize("name", STEPS)
def test_every_store_does_the_same(store: Store, name: str) -> None:
    for method, arguments, expected in STEPS[name]:
        call = getattr(store, method)
        if isinstance(expected, type):
            with pytest.raises(expected):
                call(*arguments)
        else:
            assert call(*arguments) == expected, (method, arguments)


def test_num_keys_counts_keys(store: Store) -> None:
    before = store.num_keys()
    store.set("a", "1")
    store.add("b", 1)
    store.append("c", "x")
    assert store.num_keys() == before + 3
    store.delete_key("b")
    assert store.num_keys() == before + 2


def test_list_keys_names_them(etcd_store: EtcdStore) -> None:
    etcd_store.set("b", "")
    etcd_store.add("a", 1)
    assert etcd_store.list_keys() == ["a", "b"]


def test_timeout_is_that_of_the_base(etcd_store: EtcdStore) -> None:
    etcd_store.set_timeout(SHORT)
    assert etcd_store.timeout == SHORT
    with pytest.raises(DistStoreError, match="wait timeout after 250ms, keys: /a, /b"):
        etcd_store.wait(["a", "b"])


def test_store_lives_on_in_what_torch_made_of_it(client: EtcdClient, prefix: str) -> None:
    outer = PrefixStore("outer", EtcdStore(client, prefix, GUARD)).clone()
    gc.collect()
    outer.set("key", "1")
    assert outer.get("key") == b"1"
    assert outer.num_keys() == 1
    assert outer.delete_key("key")


def test_clone_has_a_timeout_of_its_own(etcd_store: EtcdStore) -> None:
    clone = etcd_store.clone()
    clone.set_timeout(SHORT)
    assert etcd_store.timeout == GUARD
    assert clone.lease is etcd_store.lease


def test_add_to_something_else_than_a_number(etcd_store: EtcdStore) -> None:
    etcd_store.set("key", "text")
    with pytest.raises(ValueError, match="text"):
        etcd_store.add("key", 1)


@pytest.mark.parametrize(
    "write",
    [
        lambda store: store.set("key", "there"),
        lambda store: store.append("key", "there"),
        lambda store: store.multi_set(["key"], ["there"]),
        lambda store: store.compare_set("key", "", "there"),
    ],
    ids=["set", "append", "multi_set", "compare_set"],
)
def test_get_waits_for_a_key(store: Store, write: Callable[[Store], object]) -> None:
    other = store.clone()
    with meanwhile(lambda: write(other), after=0.05):
        assert store.get("key") == b"there"


def test_the_parameters_have_the_names_of_torchs_store(client: EtcdClient, prefix: str) -> None:
    store = EtcdStore(etcd_client=client, etcd_store_prefix=prefix, timeout=None)
    assert (store.client, store.prefix, store.timeout) == (client, f"{prefix.rstrip('/')}/", timedelta(seconds=300))


def watches_of(client: EtcdClient) -> threading.Event:
    """An event that is set when a client begins to watch."""
    begun = threading.Event()
    watch = client.connection.watch

    def begin(*arguments: Any) -> Any:
        begun.set()
        return watch(*arguments)

    client.connection.watch = begin  # type: ignore[method-assign]
    return begun


def test_a_wait_goes_on_through_a_cut(client: EtcdClient, proxy: Proxy, prefix: str) -> None:
    near = EtcdStore(client, prefix, GUARD)
    with EtcdClient(proxy.config) as far:
        watching = watches_of(far)
        with meanwhile(lambda: EtcdStore(far, prefix, GUARD).get("key")) as found:
            assert watching.wait(GUARD.total_seconds())
            proxy.cut()
            near.set("key", "there")
            compact(client, client.put(prefix + "other", b""))
            proxy.mend()
    assert found == [b"there"]


def test_a_wait_for_many_keys_ends_with_the_last_of_them(etcd_store: EtcdStore) -> None:
    keys = [f"{number}" for number in range(200)]
    etcd_store.multi_set(keys[:150], ["early"] * 150)
    with meanwhile(lambda: [etcd_store.clone().set(key, "late") for key in reversed(keys[150:])]):
        assert etcd_store.multi_get(keys) == [b"early"] * 150 + [b"late"] * 50


def test_waits_send_nothing_while_they_wait(client: EtcdClient, etcd_store: EtcdStore) -> None:
    sent = []
    original = client.connection.call
    client.connection.call = lambda *arguments: sent.append(arguments[0]) or original(*arguments)
    watching = watches_of(client)
    with meanwhile(lambda: etcd_store.wait(["a", "b"])):
        assert watching.wait(GUARD.total_seconds())
        time.sleep(0.5)
        assert sent == ["KV/Txn"], "one read of the keys, then the watch"
        etcd_store.multi_set(["a", "b"], ["", ""])


def test_adds_of_many_clients_are_all_counted(etcd: EtcdServer, prefix: str) -> None:
    seen: list[int] = []

    def count() -> None:
        with EtcdClient(etcd.config) as client:
            store = EtcdStore(client, prefix, GUARD)
            seen.extend(store.add("count", 1) for _ in range(10))

    threads = [threading.Thread(target=count) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(seen) == list(range(1, 81))


def test_each_thread_of_a_store_leaves_one_receipt(etcd_store: EtcdStore, client: EtcdClient, prefix: str) -> None:
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda number: etcd_store.add(f"count{number}", 1), range(200)))
    assert 1 <= client.count_prefix(f"{prefix}receipts/") <= 4


def test_keys_live_under_a_lease(client: EtcdClient, etcd_store: EtcdStore, prefix: str) -> None:
    etcd_store.set("a", "1")
    etcd_store.add("b", 1)
    etcd_store.append("c", "1")
    etcd_store.compare_set("d", "", "1")
    etcd_store.multi_set(["e"], ["1"])
    keys, _ = client.get_prefix(prefix)
    assert len(keys) == 6, "and the receipt of add and append"
    assert {key.lease for key in keys} == {etcd_store.lease.id}


def test_write_after_the_lease_was_lost(client: EtcdClient, etcd_store: EtcdStore) -> None:
    etcd_store.set("old", "1")
    revoke(client, etcd_store.lease)
    assert not etcd_store.check(["old"])
    assert etcd_store.add("new", 1) == 1
    assert etcd_store.get("new") == b"1"


def test_store_without_etcd_says_so(lone_etcd: EtcdServer, prefix: str) -> None:
    with EtcdClient(lone_etcd.config) as client:
        store = EtcdStore(client, prefix)
        lone_etcd.kill()
        store.set_timeout(SHORT)
        with pytest.raises(DistNetworkError, match="no etcd member"):
            store.set("key", "1")
        with pytest.raises(DistNetworkError, match="no etcd member"):
            store.get("key")


LONG = 300.0


def _train(endpoint: str, prefix: str, rank: int, world_size: int) -> None:
    with EtcdClient(load_config(endpoint)) as client:
        # The other one imports torch meanwhile.
        store = EtcdStore(client, prefix, timedelta(seconds=LONG))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        total = torch.tensor([float(rank + 1)])
        dist.all_reduce(total)
        gathered: list[Any] = [None] * world_size
        dist.all_gather_object(gathered, rank, group=dist.new_group())
        assert gathered == list(range(world_size))
        dist.barrier()
        dist.destroy_process_group()
        assert total.item() == sum(range(1, world_size + 1))


def test_process_group_uses_it(first_etcd: EtcdServer, prefix: str) -> None:
    # torch's all_gather_object needs it.
    pytest.importorskip("numpy")
    # Its server has torch imported for the tests of agents, too.
    context = multiprocessing.get_context("forkserver")
    processes = [context.Process(target=_train, args=(str(first_etcd.config), prefix, rank, 2)) for rank in range(2)]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(LONG)
        assert [process.exitcode for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
            process.join()
