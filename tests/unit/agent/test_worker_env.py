"""The environment of a worker: its place in the round, and the network that its collectives use."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slurm_elastic.agent.workers.processes import worker_environment
from slurm_elastic.rendezvous.membership.agents import Reason
from slurm_elastic.rendezvous.membership.assignment import Place
from slurm_elastic.rendezvous.transport.messages import Assignment


def environment(interface: str = "", for_gloo: str = "", **environ: str) -> dict[str, str]:
    spec: Any = SimpleNamespace(role="trainer", max_restarts=3)
    worker: Any = SimpleNamespace(global_rank=5, role_rank=5, world_size=8, role_world_size=8, local_rank=1)
    place = Place("n3/7.0/1", "n3", 2, 2, 4, "trainer", 4, 8, domain="7/s1", domain_base_rank=2, domain_world_size=4)
    assignment = Assignment(1, place, 4, Reason.NODE_LOST, 4, 8, "n1", 20000, 0)
    rendezvous: Any = SimpleNamespace(
        run_id="7",
        run_dir=SimpleNamespace(path=Path("/runs/7")),
        node="n3",
        incarnation="7",
        interface=interface,
        gloo_interface=interface or for_gloo,
    )
    return worker_environment(spec, worker, assignment, rendezvous, environ)


def test_a_worker_knows_its_node_by_torchs_name_and_by_that_of_other_frameworks() -> None:
    env = environment()
    assert (env["GROUP_RANK"], env["NODE_RANK"], env["GROUP_WORLD_SIZE"]) == ("2", "2", "4")
    domain = [env[f"SLURM_ELASTIC_DOMAIN{part}"] for part in ("", "_RANK", "_SIZE")]
    assert domain == ["7/s1", "3", "4"]
    assert not [name for name in env if name.endswith("SOCKET_IFNAME")]


@pytest.mark.parametrize(
    ("environ", "added"),
    [
        ({}, {"GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "=ib0"}),
        ({"GLOO_SOCKET_IFNAME": "eth0"}, {"NCCL_SOCKET_IFNAME": "=ib0"}),
        ({"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": ""}, {}),
    ],
)
def test_collectives_use_the_data_network_unless_the_environment_says_otherwise(
    environ: dict[str, str], added: dict[str, str]
) -> None:
    env = environment("ib0", **environ)
    assert {name: value for name, value in env.items() if name.endswith("SOCKET_IFNAME")} == added


def test_gloo_alone_gets_the_interface_of_a_host_whose_name_does_not_resolve() -> None:
    env = environment(for_gloo="eth0")
    assert {name: value for name, value in env.items() if "IFNAME" in name} == {"GLOO_SOCKET_IFNAME": "eth0"}
    assert "GLOO_SOCKET_IFNAME" not in environment(for_gloo="eth0", GLOO_SOCKET_IFNAME="ib0")
