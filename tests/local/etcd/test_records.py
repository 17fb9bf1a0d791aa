"""The records of a run in a real etcd."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from slurm_elastic.errors import ExitCode, RecordsError, UsageError
from slurm_elastic.rendezvous.leader.fenced_records import FencedRecords
from slurm_elastic.rendezvous.membership.agents import AgentInfo, Reason
from slurm_elastic.rendezvous.membership.assignment import build_table
from slurm_elastic.rendezvous.records.api import Records, RecordsInterruptedError, RecordsUnreachableError, Situation
from slurm_elastic.rendezvous.records.etcd import failover_channel
from slurm_elastic.rendezvous.records.etcd import records as etcd_records
from slurm_elastic.rendezvous.records.etcd.client import EtcdClient
from slurm_elastic.rendezvous.records.etcd.records import EtcdRecords
from slurm_elastic.rendezvous.records.etcd.server import EtcdServer
from slurm_elastic.rundir import RunDir
from tests.local.agents import eventually
from tests.local.etcd.test_client import compact, revoke
from tests.local.waiting import meanwhile
from tests.unit.rendezvous.helpers.records_contract import RecordsContract

OpenRecords = Callable[..., EtcdRecords]


@pytest.fixture
def run_dir(tmp_path: Path, prefix: str) -> RunDir:
    return RunDir.for_run(tmp_path, prefix.rstrip("/").rpartition("/")[2]).open()


@pytest.fixture
def first_client(first_etcd: EtcdServer) -> Iterator[EtcdClient]:
    with EtcdClient(first_etcd.config) as client:
        yield client


@pytest.fixture
def keys(first_etcd: EtcdServer, run_dir: RunDir) -> str:
    """What all keys of the run begin with."""
    return first_etcd.config.run_prefix(run_dir.run_id)


@pytest.fixture
def open_records(first_etcd: EtcdServer, run_dir: RunDir) -> Iterator[OpenRecords]:
    """Open the records of one more agent, of the first incarnation unless another is named."""
    with ExitStack() as stack:

        def open_one(etcd: EtcdServer = first_etcd, incarnation: str = "7.0", limit: float = 10.0) -> EtcdRecords:
            records = EtcdRecords(etcd.config, run_dir, incarnation, limit=limit)
            stack.callback(records.close)
            return records

        yield open_one


class TestEtcdRecords(RecordsContract):
    @pytest.fixture
    def records(self, etcd: EtcdServer, open_records: OpenRecords) -> Records:
        return open_records(etcd)

    @pytest.fixture
    def sibling(self, records: Records, etcd: EtcdServer, open_records: OpenRecords) -> Records:
        return open_records(etcd)

    @pytest.fixture
    def successor(self, records: Records, etcd: EtcdServer, open_records: OpenRecords) -> Records:
        return open_records(etcd, "7.1")


def test_every_key_is_under_the_run_s_lease_and_the_run_s_prefix(
    open_records: OpenRecords, first_client: EtcdClient, keys: str
) -> None:
    records = open_records()
    before, _ = first_client.get_prefix("/")
    write_all(records)
    after, _ = first_client.get_prefix("/")
    written = [kv for kv in after if kv.key not in {kv.key for kv in before}]
    assert [kv.key.decode().removeprefix(keys) for kv in written] == [
        "round",
        "scopes/7.0/endpoint",
        "scopes/7.0/epochs/000001",
    ]
    assert len({kv.lease for kv in written}) == 1
    assert 0 not in {kv.lease for kv in written}


def test_an_agent_that_starts_asks_once(open_records: OpenRecords, monkeypatch: pytest.MonkeyPatch) -> None:
    leader = open_records()
    leader.claim_epoch(3, {"agent": "n1"})
    leader.publish_endpoint({"port": 1})
    leader.claim_round(4, {"places": []})
    calls: list[tuple[failover_channel.Connection, str]] = []
    call = failover_channel.Connection.call

    def counted(self: failover_channel.Connection, path: str, *arguments: Any) -> Any:
        calls.append((self, path))
        return call(self, path, *arguments)

    monkeypatch.setattr(failover_channel.Connection, "call", counted)
    monkeypatch.setattr(etcd_records, "_FRESH_SECONDS", 600.0)
    newcomer = open_records()
    assert not newcomer.is_done()
    assert newcomer.newest_epoch() == 3
    assert newcomer.situation() == Situation({"port": 1}, 4, {"places": []})
    # Others renew a lease now and then.
    assert [method for by, method in calls if by is newcomer.client.connection] == ["KV/Txn"]
    # What it asks again is asked of etcd.
    leader.publish_endpoint({"port": 2})
    leader.claim_epoch(5, {})
    leader.mark_done({})
    assert newcomer.situation().endpoint == {"port": 2}
    assert newcomer.newest_epoch() == 5
    assert newcomer.is_done()


def test_what_was_not_there_at_the_start_is_asked_for_again(open_records: OpenRecords) -> None:
    leader, newcomer = open_records(), open_records()
    leader.claim_epoch(1, {})
    leader.publish_endpoint({"port": 1})
    assert newcomer.newest_epoch() == 1
    assert newcomer.situation().endpoint == {"port": 1}


def write_all(records: Records) -> None:
    assert records.claim_epoch(1, {"agent": "n1"})
    records.publish_endpoint({"port": 1})
    for number in range(3):
        assert records.claim_round(number, {"places": []})
    assert records.mark_done({})
    records.publish_failure({})


def test_the_record_of_a_large_round_is_smaller_than_a_request_may_be(
    open_records: OpenRecords, first_client: EtcdClient, keys: str
) -> None:
    pids = random.Random(1)
    agents = [f"n{index}/1234.0/{pids.randrange(1 << 22)}" for index in range(16384)]
    table = build_table(0, Reason.START, [AgentInfo(each, each.split("/")[0], 0, 8, "", "", 1) for each in agents], 0)
    FencedRecords(open_records(), "7.0", 1, {"agent": agents[0]}, None).write_round(table)
    written = first_client.get(f"{keys}round")
    assert written is not None
    assert len(written.value) < 1.5 * (1 << 20) / 2
    found = open_records().situation().round
    assert found is not None
    assert [place["agent"] for place in found["places"]] == sorted(agents, key=lambda each: int(each[1:].split("/")[0]))


def test_what_has_to_outlive_the_lease_is_in_the_run_directory_too(
    open_records: OpenRecords, run_dir: RunDir, first_client: EtcdClient, keys: str
) -> None:
    write_all(open_records())
    assert first_client.delete(keys, prefix=True) == 3
    later = open_records()
    assert later.is_done()
    assert later.last_round() == 2
    assert later.newest_epoch() == 1
    assert run_dir.read_record("failures", "7.0") == {}


def test_records_that_etcd_lost_are_those_of_the_run_directory(
    open_records: OpenRecords, first_client: EtcdClient, keys: str
) -> None:
    leader, other = open_records(), open_records()
    leader.claim_epoch(1, {"agent": "n1"})
    leader.publish_endpoint({"port": 1})
    leader.claim_round(4, {"places": [1]})
    # As after an outage of the lease's length: the lease is gone, and its keys with it.
    revoke(first_client, first_client.shared_lease(keys, 45))
    assert other.situation() == Situation({"port": 1}, 4, {"places": [1]})
    assert other.newest_epoch() == 1
    assert not other.claim_epoch(1, {})
    assert not other.claim_round(4, {})
    assert leader.claim_round(5, {"places": [2]})
    assert other.situation().round == {"places": [2]}


def test_what_was_not_written_with_the_secret_is_dropped_and_told_once(
    open_records: OpenRecords, warnings: list[str], first_client: EtcdClient, keys: str
) -> None:
    records = open_records()
    for key in ("done", "round", "scopes/7.0/endpoint", "scopes/7.0/epochs/000009"):
        first_client.put(keys + key, b'{"port": 1}')
    # Each agent sees them; the leader tells.
    assert records.situation().endpoint is None
    assert warnings == []
    # Ours, but under another key.
    records.claim_epoch(1, {})
    first_client.put(f"{keys}scopes/7.0/epochs/000008", first_client.get(f"{keys}scopes/7.0/epochs/000001").value)
    for _ in range(2):
        assert records.situation().endpoint is None
        assert records.newest_epoch() == 1
        assert not records.is_done()
    assert len(warnings) == 5
    assert all("was not written by this run" in line for line in warnings)
    with pytest.raises(RecordsError, match="etcdctl del"):
        records.claim_round(0, {})


def test_a_leader_is_found_though_others_write_over_its_endpoint(
    open_records: OpenRecords, first_client: EtcdClient, keys: str
) -> None:
    leader, searching = open_records(), open_records()
    assert searching.situation().endpoint is None
    leader.claim_epoch(1, {})
    leader.publish_endpoint({"port": 1})
    first_client.put(f"{keys}scopes/7.0/endpoint", b'{"port": 2}')
    assert searching.situation().endpoint == {"port": 1}


def test_a_key_of_others_that_keeps_an_agent_from_leading_is_named(
    open_records: OpenRecords, warnings: list[str], first_client: EtcdClient, keys: str
) -> None:
    records = open_records()
    key = f"{keys}scopes/7.0/epochs/000001"
    first_client.put(key, b"{}")
    assert not records.claim_epoch(1, {})
    assert warnings == [f"dropped the etcd key {key}: it was not written by this run (no signature of this run)"]


def test_an_outage_is_waited_through(lone_etcd: EtcdServer, open_records: OpenRecords) -> None:
    records = open_records(lone_etcd, limit=30.0)
    records.claim_epoch(1, {})
    lone_etcd.kill()
    with meanwhile(lambda: records.claim_round(0, {"places": []})) as claimed:
        time.sleep(0.5)
        assert claimed == []
        lone_etcd.start()
    assert claimed == [True]
    assert records.newest_epoch() == 1
    assert records.situation().round == {"places": []}


def test_an_etcd_lost_for_good_is_told_without_being_asked(lone_etcd: EtcdServer, open_records: OpenRecords) -> None:
    records = open_records(lone_etcd, limit=2.0)
    lost: list[RecordsError] = []
    records.on_loss(lost.append)
    lone_etcd.kill()
    eventually(lambda: bool(lost))
    assert lost[0].exit_code is ExitCode.LEFT
    assert f"etcd at {lone_etcd.config} is silent" in str(lost[0])
    with pytest.raises(RecordsUnreachableError, match="no etcd member"):
        records.newest_epoch()


def test_a_compaction_costs_nothing(open_records: OpenRecords, first_client: EtcdClient) -> None:
    records = open_records()
    assert records.claim_round(0, {"places": []})
    assert records.claim_epoch(1, {})
    compact(first_client, first_client.put("/other", b""))
    assert not records.claim_epoch(1, {})
    assert records.claim_round(1, {"places": [1]})
    assert records.situation() == Situation(None, 1, {"places": [1]})


def test_a_wait_ends_when_it_is_told_to(lone_etcd: EtcdServer, open_records: OpenRecords) -> None:
    records = open_records(lone_etcd, limit=600.0)
    lone_etcd.kill()
    threading.Timer(0.3, records.stop_waiting).start()
    with pytest.raises(RecordsInterruptedError):
        records.situation()
    began = time.monotonic()
    with pytest.raises(RecordsUnreachableError):
        records.situation()
    assert time.monotonic() - began < 60


def test_a_run_directory_that_fails_is_told_once_and_not_needed(
    open_records: OpenRecords, run_dir: RunDir, warnings: list[str]
) -> None:
    records = open_records()
    (run_dir.path / "rounds").rename(run_dir.path / "elsewhere")
    assert records.claim_epoch(1, {})
    assert records.claim_round(0, {})
    assert records.claim_round(1, {})
    assert records.last_round() == 1
    assert len(warnings) == 1
    assert warnings[0].endswith("the run goes on with etcd alone")


def last_round_of(records: Records) -> None:
    with contextlib.suppress(RecordsError):
        records.last_round()


def test_only_the_leader_tells_about_lost_members(
    lone_etcd: EtcdServer, open_records: OpenRecords, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failover_channel, "OUTAGE_SECONDS", 0.4)
    leader, other = (open_records(lone_etcd) for _ in range(2))
    leader.claim_epoch(1, {})
    lone_etcd.kill()
    # Both wait long enough for a line.
    threads = [threading.Thread(target=last_round_of, args=(records,)) for records in (leader, other)]
    for thread in threads:
        thread.start()
    eventually(lambda: bool(warnings))
    time.sleep(1.0)
    for records in (leader, other):
        records.stop_waiting()
    for thread in threads:
        thread.join()
    assert [line.partition("(")[0] for line in warnings] == ["no etcd member answers "]


def test_a_start_that_is_interrupted_ends_at_once(lone_etcd: EtcdServer, run_dir: RunDir) -> None:
    lone_etcd.kill()
    began = time.monotonic()
    with pytest.raises(RecordsInterruptedError):
        EtcdRecords(lone_etcd.config, run_dir, "7.0", limit=600.0, interrupted=lambda: time.monotonic() > began + 0.3)
    assert time.monotonic() - began < 60


def test_an_etcd_that_is_not_there_at_the_start(lone_etcd: EtcdServer, run_dir: RunDir) -> None:
    lone_etcd.kill()
    with pytest.raises(RecordsUnreachableError, match="check that etcd runs") as caught:
        EtcdRecords(lone_etcd.config, run_dir, "7.0", limit=1.0)
    assert caught.value.exit_code is ExitCode.LEFT
    assert not isinstance(caught.value, UsageError)
