"""Agents whose run is coordinated over etcd."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable

from slurm_elastic.rendezvous.records.etcd.client import EtcdClient
from slurm_elastic.rendezvous.records.etcd.server import EtcdServer
from tests.local.agents import WORKER, Allocation
from tests.local.etcd.helpers.processes import stopped
from tests.local.etcd.test_bad_input import http_server

Allocate = Callable[..., Allocation]


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
    nodes.finish(*left.values())
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
    nodes = allocate(2)
    left = {agent.node: agent for agent in nodes.start_all(f"--rdzv-endpoint={lone_etcd.config}")}
    nodes.seen(0)
    lone_etcd.kill()
    leader = left[nodes.leader()]
    (other,) = left.keys() - {leader.node}
    lost = left.pop(other)
    lost.kill()
    leader.expect(f"lost {lost.node}")
    leader.expect("no etcd member answers")
    assert nodes.rounds() == 1
    lone_etcd.start()
    assert nodes.nodes_of(1) == sorted(left)
    lone_etcd.kill()
    nodes.finish(leader)
    assert (nodes.run_dir / "done.json").exists()


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


def test_an_etcd_that_cannot_be_used_is_one_line(allocate: Allocate) -> None:
    with http_server({"hello": "world"}) as endpoint:
        agent = allocate(1).start(1, SLURM_ELASTIC_ETCD_ENDPOINT=f"etcd://{endpoint}")
        assert agent.wait() == 2
    assert agent.err.count("\n") == 1
    refusal = f"slurm-elastic: error: cannot use etcd: something else than etcd answers at {endpoint}; "
    assert agent.err.startswith(f"{refusal}give etcd's client port")
