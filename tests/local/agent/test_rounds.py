"""What workers see from round to round."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable

import pytest

from slurm_elastic.rendezvous.leader.absent_agents import own_releases
from slurm_elastic.slurm import ephemeral_low, port_sequence
from tests.local.agents import Allocation, eventually
from tests.local.waiting import is_there

Allocate = Callable[..., Allocation]


def test_the_leader_can_be_on_another_node_than_the_first(allocate: Allocate) -> None:
    nodes = allocate(2)
    nodes.start(2, "--leader-node", nodes.nodes[1])
    published = nodes.run_dir / "endpoints" / "7.0.json"
    eventually(published.exists, nodes.log)
    # Where all expect it. Whoever steps in for a leader that never came listens somewhere else.
    assert json.loads(published.read_text())["port"] in port_sequence("7", 0, ephemeral_low())
    nodes.start(1, "--leader-node", nodes.nodes[1])
    assert nodes.nodes_of(0) == [*nodes.nodes]


def test_other_releases_on_a_node_are_named_in_one_line(allocate: Allocate) -> None:
    nodes = allocate(2)
    leader = nodes.start(1)
    eventually(nodes.is_led, nodes.log)
    nodes.start(2, constants={"torch.__version__": "2.99.0"})
    assert nodes.nodes_of(0) == [*nodes.nodes]
    leader.expect("install the same releases on all nodes of a run")
    (line,) = [line for line in leader.err.splitlines() if "releases" in line]
    assert f"127.0.0.2 has Python {sys.version_info[0]}.{sys.version_info[1]}, torch 2.99.0" in line
    assert f"127.0.0.1 has {own_releases()}" in line


def test_two_workers_on_each_of_two_nodes(allocate: Allocate) -> None:
    nodes = allocate(2)
    agents = nodes.start_all("--nproc-per-node=2", "--role=trainer", "--max-restarts=3")
    seen = nodes.seen(0)
    for rank, record in seen.items():
        env, node = record["env"], nodes.nodes[rank // 2]
        logs = nodes.run_dir / "logs" / "round_0000" / node / f"rank_0{rank}"
        given = {**nodes.environment(1 + rank // 2), "PYTHONPATH": env["PYTHONPATH"]}
        expected = given | {
            "GROUP_RANK": str(rank // 2),
            "GROUP_WORLD_SIZE": "2",
            "LOCAL_RANK": str(rank % 2),
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": seen[0]["env"]["MASTER_PORT"],
            "RANK": str(rank),
            "ROLE_NAME": "trainer",
            "ROLE_RANK": str(rank),
            "ROLE_WORLD_SIZE": "4",
            "SLURM_ELASTIC_NODE": node,
            "SLURM_ELASTIC_REASON": "start",
            "SLURM_ELASTIC_ROUND": "0",
            "SLURM_ELASTIC_RUN_DIR": str(nodes.run_dir),
            "SLURM_ELASTIC_RUN_ID": "7",
            "TORCHELASTIC_ERROR_FILE": str(logs / "error.json"),
            "TORCHELASTIC_MAX_RESTARTS": "3",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_RUN_ID": "7",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
            "WORLD_SIZE": "4",
        }
        assert {name: env.get(name) for name in expected} == expected
    nodes.finish(*agents)
    assert sorted(agents[1].out.splitlines()) == [f"[127.0.0.2/{rank}] working in round 0" for rank in (2, 3)]


def test_restarts_are_counted_for_the_run_and_membership_costs_none(allocate: Allocate) -> None:
    nodes = allocate(3)
    agents = [nodes.start(number, "--max-restarts=2") for number in (1, 2, 3)]
    ports = []

    def counts(round_: int) -> set[tuple[str, str]]:
        seen = nodes.seen(round_)
        ports.append({record["env"]["MASTER_PORT"] for record in seen.values()})
        return {
            (record["env"]["TORCHELASTIC_RESTART_COUNT"], record["env"]["SLURM_ELASTIC_REASON"])
            for record in seen.values()
        }

    assert counts(0) == {("0", "start")}
    nodes.touch("fail.0.1", "1")
    assert counts(1) == {("1", "worker_failed")}
    # Before there was a round of another size: this script reports no steps, so its failure in a round that lasted less
    # than a quarter of that one would count as the size's.
    nodes.touch("fail.1.2", "1")
    assert counts(2) == {("2", "worker_failed")}
    agents[1].signal(signal.SIGTERM)
    assert agents[1].wait() == 75
    assert counts(3) == {("2", "node_left")}
    agents[1] = nodes.start(2, "--max-restarts=2")
    assert counts(4) == {("2", "node_joined")}
    # Each round has a store of its own, and no agent offers a port twice.
    assert [len(port) for port in ports] == [1] * 5
    assert len(set.union(*ports)) == 5
    nodes.finish(*agents)
    # What every worker of every round wrote is there.
    logs = {
        str(path.relative_to(nodes.run_dir / "logs")): path.read_text()
        for path in (nodes.run_dir / "logs").rglob("stdout.log")
    }
    places = [["127.0.0.1", "127.0.0.2", "127.0.0.3"]] * 5
    places[3] = ["127.0.0.1", "127.0.0.3"]
    assert logs == {
        f"round_{round_:04d}/{node}/rank_{rank:02d}/stdout.log": f"working in round {round_}\n"
        for round_, members in enumerate(places)
        for rank, node in enumerate(members)
    }
    assert [event["event"] for event in nodes.events() if event["event"] == "round_ended"] == ["round_ended"] * 4


def test_who_finished_early_takes_part_again_when_a_member_leaves(allocate: Allocate) -> None:
    nodes = allocate(3)
    # Were it to wait for workers that have ended, this would be for how long.
    agents = nodes.start_all("--shutdown-timeout=300", LOGLEVEL="DEBUG")
    nodes.seen(0)
    nodes.touch("finish.0")
    agents[0].expect("the workers of 127.0.0.1 have ended well")
    (nodes.directory / "finish.0").unlink()
    agents[1].signal(signal.SIGTERM)
    assert agents[1].wait() == 75
    assert nodes.nodes_of(1) == ["127.0.0.1", "127.0.0.3"]
    nodes.finish(agents[0], agents[2])


MEETING = """\
import os, pathlib, signal, sys, time

rank = os.environ["RANK"]

def save(*_):
    pathlib.Path(f"saved.{rank}").touch()
    sys.exit(0)

if os.environ["SLURM_ELASTIC_ROUND"] == "0":
    signal.signal(signal.SIGTERM, save)
    if rank == "1":
        import torch.distributed as dist
    pathlib.Path(f"there.{rank}").touch()
    if rank == "1":
        dist.init_process_group("gloo")
    while True:
        time.sleep(0.1)
"""


def test_workers_that_wait_in_the_store_for_a_peer_that_was_stopped_can_save(allocate: Allocate) -> None:
    nodes = allocate(3)
    (nodes.directory / "meeting.py").write_text(MEETING)
    conf = "--rdzv-conf=last_call_timeout=0.01,min_round_time=0"
    options = ("--nnodes=2:3", conf, "--shutdown-timeout=300")
    agents = [nodes.start(number, *options, script=("meeting.py",)) for number in (1, 2)]
    eventually(lambda: all((nodes.directory / f"there.{rank}").exists() for rank in (0, 1)), nodes.log)
    agents.append(nodes.start(3, *options, script=("meeting.py",)))
    # Rank 1 waits in C++ code, where no handler of Python's runs. Nobody is killed; it is the end of the store that
    # brings it back.
    assert [agent.wait() for agent in agents] == [0, 0, 0]
    assert {path.name for path in nodes.directory.glob("saved.*")} == {"saved.0", "saved.1"}


class JumpingClock:
    """A wall clock that is an hour further back at every look than at the one before."""

    def __init__(self) -> None:
        self._looks = 0

    def __call__(self) -> float:
        self._looks += 1
        return time.time_ns() / 1e9 - 3600 * self._looks


def test_a_member_that_is_silent_for_a_while_is_given_up_and_joins_again_whatever_the_wall_clock_does(
    allocate: Allocate,
) -> None:
    nodes = allocate(2)
    agents = nodes.start_led("--rdzv-conf=heartbeat_limit=1", constants={"time.time": JumpingClock()})
    seen = nodes.seen(0)
    agents[1].signal(signal.SIGSTOP)
    alone = nodes.comes_to(nodes.nodes[:1], after=0)
    agents[1].signal(signal.SIGCONT)
    whole = nodes.comes_to(nodes.nodes, after=alone)
    # Its old workers were stopped before it joined again.
    assert not is_there(seen[1])
    assert nodes.seen(whole)[0]["env"]["TORCHELASTIC_RESTART_COUNT"] == "0"
    nodes.finish(*agents)
    lost = [event for event in nodes.events() if event["event"] == "node_lost" and event["nodes"] == ["127.0.0.2"]]
    assert lost[0]["why"] == "silent"
    # An hour, and more with every look, by that clock.
    assert 1 <= lost[0]["silent_for"] < 1800


def test_modules_programs_and_recorded_errors(allocate: Allocate) -> None:
    nodes = allocate(1)
    (nodes.directory / "package").mkdir()
    (nodes.directory / "package" / "train.py").write_text("import sys\nprint('module', *sys.argv[1:])\n")
    module = nodes.start(1, "-m", script=["package.train", "--lr", "1e-3"])
    assert module.wait() == 0, module.err
    assert module.out == "[127.0.0.1/0] module --lr 1e-3\n"

    program = allocate(1, job_id="8")
    echo = program.start(1, "--no-python", "--nproc-per-node=2", script=["/bin/echo", "rank", "${local_rank}"])
    assert echo.wait() == 0, echo.err
    assert sorted(echo.out.splitlines()) == ["[127.0.0.1/0] rank 0", "[127.0.0.1/1] rank 1"]

    recorded = allocate(1, job_id="9")
    (recorded.directory / "recorded.py").write_text(
        "from torch.distributed.elastic.multiprocessing.errors import record\n"
        "@record\n"
        "def main():\n"
        "    raise ValueError('no such batch')\n"
        "main()\n"
    )
    failing = recorded.start(1, script=["recorded.py"])
    assert failing.wait() == 1
    assert failing.err.splitlines()[-2] == "  ValueError: no such batch"
    error = recorded.run_dir / "logs" / "round_0000" / "127.0.0.1" / "rank_00" / "error.json"
    assert "no such batch" in json.loads(error.read_text())["message"]["message"]


@pytest.mark.parametrize("option", ["--node-unit=2", "--valid-nodes=2"])
def test_rounds_have_a_valid_number_of_nodes_and_the_others_are_spares(allocate: Allocate, option: str) -> None:
    nodes = allocate(3)
    agents = nodes.start_led(option)
    members = nodes.nodes_of(0)
    (spare,) = [agent for agent in agents if agent.node not in members]
    spare.expect("waits as a spare")
    victim = next(agent for agent in agents if agent.node in members and agent.node != nodes.leader())
    victim.signal(signal.SIGTERM)
    after = nodes.nodes_of(1)
    assert len(members) == len(after) == 2
    assert set(after) - set(members) == {spare.node}
    nodes.touch("finish")
    assert [agent.wait() for agent in agents if agent is not victim] == [0, 0]
