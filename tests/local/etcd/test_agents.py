"""Agents whose run is coordinated over etcd."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from slurm_elastic.rendezvous.etcd import EtcdClient, EtcdServer
from slurm_elastic.rendezvous.etcd.errors import EtcdNoSpaceError
from slurm_elastic.rendezvous.etcd.machine import find_binary
from tests.local.agents import WORKER, Allocation, allocation
from tests.local.etcd.cluster import Cluster
from tests.local.etcd.test_bad_input import fill, http_server

Allocate = Callable[..., Allocation]


@pytest.fixture
def allocate(tmp_path: Path) -> Iterator[Allocate]:
    """Make an allocation of so many nodes in a directory of its own."""
    with ExitStack() as stack:

        def make(size: int, **options: Any) -> Allocation:
            return stack.enter_context(allocation(tmp_path, size, **options))

        yield make


def test_a_run_over_etcd(lone_etcd: EtcdServer, allocate: Allocate) -> None:
    nodes = allocate(3)
    agents = nodes.start_all(f"--rdzv-endpoint={lone_etcd.config}")
    assert nodes.nodes_of(0) == list(nodes.nodes)
    with EtcdClient(lone_etcd.config) as client:
        prefix = f"{lone_etcd.config.run_prefix('7')}"
        kept, _ = client.get_prefix(prefix)
    keys = [kv.key.decode().removeprefix(prefix) for kv in kept]
    # There are further epochs if the first node's agent starts much later than the others.
    assert keys[:3] == ["round", "scopes/7.0/endpoint", "scopes/7.0/epochs/000001"]
    agents[1].kill()
    assert nodes.nodes_of(1) == ["127.0.0.1", "127.0.0.3"]
    nodes.touch("finish")
    assert [agents[0].wait(), agents[2].wait()] == [0, 0]
    assert "etcd" not in nodes.story()


def test_an_outage_disturbs_nobody_and_a_change_of_membership_waits_for_its_end(
    lone_etcd: EtcdServer, allocate: Allocate
) -> None:
    nodes = allocate(3)
    agents = nodes.start_all(f"--rdzv-endpoint={lone_etcd.config}")
    before = nodes.seen(0)
    lone_etcd.kill()
    # Long enough for every agent to have asked etcd for something, if it asks at all.
    time.sleep(1.0)
    assert nodes.rounds() == 1
    agents[2].kill()
    agents[0].expect("lost 127.0.0.3")
    agents[0].expect("no etcd member answers")
    assert nodes.rounds() == 1
    lone_etcd.start()
    assert nodes.nodes_of(1) == ["127.0.0.1", "127.0.0.2"]
    # The end of a run does not wait for etcd.
    lone_etcd.kill()
    nodes.touch("finish")
    assert [agent.wait() for agent in agents[:2]] == [0, 0]
    assert (nodes.run_dir / "done.json").exists()
    assert nodes.story().count("that the run is finished is written in the run directory alone") == 1
    assert before[0]["env"]["TORCHELASTIC_RESTART_COUNT"] == "0"


def test_an_etcd_lost_for_good_ends_all_agents(lone_etcd: EtcdServer, allocate: Allocate) -> None:
    nodes = allocate(2)
    agents = nodes.start_all(f"--rdzv-endpoint={lone_etcd.config}", "--rdzv-conf=etcd_limit=2")
    nodes.seen(0)
    lone_etcd.kill()
    assert [agent.wait() for agent in agents] == [75, 75]
    for agent in agents:
        assert "etcd" in agent.err
        assert "Traceback" not in agent.err
    assert not nodes.processes(WORKER.name)


def test_a_signal_ends_the_wait_for_etcd(lone_etcd: EtcdServer, allocate: Allocate) -> None:
    lone_etcd.kill()
    nodes = allocate(1)
    agent = nodes.start(1, f"--rdzv-endpoint={lone_etcd.config}")
    agent.expect("no etcd member answers")
    told = time.monotonic()
    agent.signal(signal.SIGTERM)
    assert agent.wait() == 75
    assert time.monotonic() - told < 1.0


def refused(nodes: Allocation, *arguments: str, **variables: str) -> str:
    """The one line by which an agent says that it cannot even start."""
    agent = nodes.start(1, *arguments, **variables)
    assert agent.wait() == 2
    # That a member is down may have been said before.
    assert len([line for line in agent.err.splitlines() if " is lost " not in line]) == 1
    return agent.err.removeprefix("slurm-elastic: error: ")


def test_an_etcd_that_cannot_be_used(allocate: Allocate) -> None:
    nodes = allocate(1)
    assert "there is no host of this name" in refused(nodes, "--rdzv-endpoint=etcd://wrong.invalid:1")
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


def test_three_members_with_tls_and_passwords(allocate: Allocate, tmp_path_factory: pytest.TempPathFactory) -> None:
    cluster = Cluster(tmp_path_factory.mktemp("members"), find_binary())
    try:
        config = cluster.config
        nodes = allocate(2)
        conf = ",".join(f"{name}={getattr(config, name)}" for name in ("ca_cert", "ssl_cert", "ssl_cert_key", "user"))
        agents = [
            nodes.start(
                number,
                f"--rdzv-endpoint={config}",
                f"--rdzv-conf={conf}",
                SLURM_ELASTIC_ETCD_PASSWORD=str(config.password),
            )
            for number in (1, 2)
        ]
        seen = nodes.seen(0)
        assert all("SLURM_ELASTIC_ETCD_PASSWORD" not in record["env"] for record in seen.values())
        for member in cluster.members[:1]:
            member.kill()
        time.sleep(0.5)
        assert nodes.rounds() == 1
        nodes.touch("finish")
        assert [agent.wait() for agent in agents] == [0, 0]
        lines = [line for line in nodes.story().splitlines() if "etcd" in line]
        assert len(lines) <= 1, lines
        assert str(config.password) not in nodes.story()
        options = (f"--rdzv-endpoint={config}", f"--rdzv-conf={conf}")
        assert "does not accept the password" in refused(nodes, *options, SLURM_ELASTIC_ETCD_PASSWORD="wrong")
        assert "denies user 'trainer'" in refused(
            nodes, options[0], f"{options[1]},key_prefix=/mine/", SLURM_ELASTIC_ETCD_PASSWORD=str(config.password)
        )
    finally:
        cluster.stop()
