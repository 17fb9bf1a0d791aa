"""Agents whose run is coordinated over etcd."""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections.abc import Callable, Iterator

import pytest

from slurm_elastic.rendezvous.records.etcd import EtcdClient, EtcdServer
from slurm_elastic.rendezvous.records.etcd.errors import EtcdNoSpaceError
from slurm_elastic.rendezvous.records.etcd.server import find_binary
from tests.local.agents import WORKER, Allocation, allocation
from tests.local.etcd.helpers.cluster import Cluster
from tests.local.etcd.helpers.processes import stopped
from tests.local.etcd.test_bad_input import fill, http_server

Allocate = Callable[..., Allocation]


class LongRun:
    """A run of two nodes over three members of etcd with TLS and passwords, which lasts as long as the tests here."""

    def __init__(self, nodes: Allocation, cluster: Cluster) -> None:
        self.nodes, self.cluster = nodes, cluster
        config = cluster.config
        names = ("ca_cert", "ssl_cert", "ssl_cert_key", "user")
        conf = ",".join(["heartbeat_limit=20", *(f"{name}={getattr(config, name)}" for name in names)])
        self.options = (f"--rdzv-endpoint={config}", f"--rdzv-conf={conf}")
        self.password = str(config.password)
        self._lost_at: float | None = None
        nodes.start_all(*self.options, SLURM_ELASTIC_ETCD_PASSWORD=self.password)

    def lose_etcd(self) -> float:
        """Have all members end, one after the other, and return when the last one did."""
        if self._lost_at is None:
            self.nodes.seen(0)
            self.cluster.stop()
            self._lost_at = time.monotonic()
        return self._lost_at


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LongRun]:
    cluster = Cluster(tmp_path_factory.mktemp("members"), find_binary())
    try:
        # Under another number than the other runs here: their ports follow from it.
        with allocation(tmp_path_factory.mktemp("long"), 2, job_id="20") as nodes:
            yield LongRun(nodes, cluster)
    finally:
        cluster.stop()


def test_a_run_loses_all_members_of_etcd(long_run: LongRun) -> None:
    # What comes of it says the last test here.
    seen = long_run.nodes.seen(0)
    assert all("SLURM_ELASTIC_ETCD_PASSWORD" not in record["env"] for record in seen.values())
    long_run.lose_etcd()


def test_a_run_over_etcd(lone_etcd: EtcdServer, allocate: Allocate) -> None:
    nodes = allocate(3)
    agents = nodes.start_all(f"--rdzv-endpoint={lone_etcd.config}", "--rdzv-conf=heartbeat_limit=3,last_call_timeout=5")
    assert nodes.nodes_of(0) == list(nodes.nodes)
    with EtcdClient(lone_etcd.config) as client:
        prefix = f"{lone_etcd.config.run_prefix('7')}"
        kept, _ = client.get_prefix(prefix)
    keys = [kv.key.decode().removeprefix(prefix) for kv in kept]
    # There are further epochs if the first node's agent starts much later than the others.
    assert keys[:3] == ["round", "scopes/7.0/endpoint", "scopes/7.0/epochs/000001"]
    # The connections of the leader stand; nothing but its silence tells. It is another one if the first started late.
    leading = nodes.leader()
    (leader,) = (agent for agent in agents if agent.node == leading)
    with stopped(leader.pid):
        without = nodes.comes_to([node for node in nodes.nodes if node != leading], after=0)
    # It finds that it was followed, and joins.
    whole = nodes.comes_to(list(nodes.nodes), after=without)
    left = {agent.node: agent for agent in agents}
    left.pop(nodes.leader()).kill()
    nodes.comes_to(sorted(left), after=whole)
    nodes.touch("finish")
    assert [agent.wait() for agent in left.values()] == [0, 0]
    assert "etcd" not in nodes.log()
    # A leader that was followed has formed no round after that, and every epoch is somebody else's.
    epochs = leaders(nodes)
    assert [epoch for epoch, _ in epochs] == sorted(epoch for epoch, _ in epochs)
    assert len(set(epochs)) == len({epoch for epoch, _ in epochs}) >= 3


def leaders(nodes: Allocation) -> list[tuple[int, str]]:
    """The epoch of every round, and on which node it was led."""
    rounds = [json.loads(path.read_text()) for path in sorted((nodes.run_dir / "rounds").glob("*.json"))]
    return [(round_["epoch"], str(round_["leader"]).split("/")[0]) for round_ in rounds]


def test_a_change_of_membership_waits_for_etcd_and_the_end_of_a_run_does_not(
    lone_etcd: EtcdServer, allocate: Allocate
) -> None:
    nodes = allocate(3)
    left = {agent.node: agent for agent in nodes.start_all(f"--rdzv-endpoint={lone_etcd.config}")}
    before = nodes.seen(0)
    lone_etcd.kill()
    leader = left[nodes.leader()]
    lost = left.pop(max(left.keys() - {leader.node}))
    lost.kill()
    leader.expect(f"lost {lost.node}")
    leader.expect("no etcd member answers")
    assert nodes.rounds() == 1
    lone_etcd.start()
    assert nodes.nodes_of(1) == sorted(left)
    lone_etcd.kill()
    nodes.touch("finish")
    assert [agent.wait() for agent in left.values()] == [0, 0]
    assert (nodes.run_dir / "done.json").exists()
    assert nodes.log().count("only the run directory has the record that the run is finished") == 1
    assert before[0]["env"]["TORCHELASTIC_RESTART_COUNT"] == "0"


def test_an_etcd_lost_for_good_ends_all_agents(lone_etcd: EtcdServer, allocate: Allocate) -> None:
    nodes = allocate(2)
    agents = nodes.start_all(f"--rdzv-endpoint={lone_etcd.config}", "--rdzv-conf=etcd_limit=4")
    nodes.seen(0)
    lone_etcd.kill()
    assert [agent.wait() for agent in agents] == [75, 75]
    for agent in agents:
        assert "etcd" in agent.err
        assert "Traceback" not in agent.err, agent.err
    assert not nodes.processes(WORKER.name)


def test_a_signal_ends_the_wait_for_etcd(lone_etcd: EtcdServer, allocate: Allocate) -> None:
    lone_etcd.kill()
    nodes = allocate(1)
    agent = nodes.start(1, f"--rdzv-endpoint={lone_etcd.config}")
    agent.expect("no etcd member answers")
    # It would wait for minutes. How soon every wait ends: test_client.py.
    agent.signal(signal.SIGTERM)
    assert agent.wait() == 75


def refused(nodes: Allocation, *arguments: str, **variables: str) -> str:
    """The one line by which an agent says that it cannot even start."""
    agent = nodes.start(1, *arguments, **variables)
    assert agent.wait() == 2
    # That a member is down may have been said before.
    assert len([line for line in agent.err.splitlines() if " is lost " not in line]) == 1
    return agent.err.removeprefix("slurm-elastic: error: ")


def test_an_etcd_that_cannot_be_used(allocate: Allocate) -> None:
    nodes = allocate(1)
    assert "is no host:port" in refused(nodes, "--rdzv-endpoint=etcd://host:port")
    with http_server({"hello": "world"}) as endpoint:
        line = refused(nodes, SLURM_ELASTIC_ETCD_ENDPOINT=f"etcd://{endpoint}")
    assert line.startswith(f"cannot use etcd: something else than etcd answers at {endpoint}; give etcd's client port")
    assert "cannot read the etcd credentials file" in refused(nodes, SLURM_ELASTIC_ETCD_CREDENTIALS="/nonexistent")
    assert "can be read by every user" in refused(nodes, "--rdzv-endpoint=etcd://host", "--rdzv-conf=password=x")
    with EtcdServer(arguments=["--quota-backend-bytes=1000000"]) as etcd, EtcdClient(etcd.config) as client:
        with contextlib.suppress(EtcdNoSpaceError):
            fill(client, "/other/key")
        line = refused(nodes, f"--rdzv-endpoint={etcd.config}")
    assert line.startswith(f"the database of etcd at {etcd.config} is full (NOSPACE); its administrator has to free")


def test_a_run_has_trained_through_20_seconds_without_any_member(long_run: LongRun) -> None:
    nodes, cluster = long_run.nodes, long_run.cluster
    since = long_run.lose_etcd()
    while time.monotonic() < since + 20.0:
        time.sleep(0.1)
        assert all(agent.running() for agent in nodes.agents)
    assert nodes.rounds() == 1
    lines = [line for line in nodes.log().splitlines() if "etcd" in line]
    assert len(lines) <= 3, "one for each member at most"
    cluster.start()
    nodes.agents[1].kill()
    assert nodes.nodes_of(1) == [nodes.nodes[0]]
    nodes.touch("finish")
    assert nodes.agents[0].wait() == 0
    assert long_run.password not in nodes.log()
    options = long_run.options
    assert "does not accept the password" in refused(nodes, *options, SLURM_ELASTIC_ETCD_PASSWORD="wrong")
    assert "denies user 'trainer'" in refused(
        nodes, options[0], f"{options[1]},key_prefix=/mine/", SLURM_ELASTIC_ETCD_PASSWORD=long_run.password
    )
