"""What torch's own tests say of its agent, where we keep it, and torchrun with our rendezvous.

See test/distributed/elastic/agent/server/test/{local_elastic_agent_test,api_test}.py in torch 2.13.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable

from tests.local.agents import Allocation, eventually
from tests.local.waiting import is_there

Allocate = Callable[..., Allocation]


def test_workers_that_do_nothing_finish(allocate: Allocate) -> None:
    nodes = allocate(2)
    nodes.touch("finish")
    agents = nodes.start_all("--nproc-per-node=2", "--log-dir=/dev/null")
    assert [agent.wait() for agent in agents] == [0, 0]
    assert nodes.rounds() == 1
    assert not (nodes.run_dir / "logs" / "round_0000").exists()


def test_nodes_may_have_different_numbers_of_workers(allocate: Allocate) -> None:
    nodes = allocate(3)
    agents = [nodes.start(number, f"--nproc-per-node={workers}") for number, workers in ((1, 1), (2, 3), (3, 2))]
    seen = nodes.seen(0)
    assert [
        tuple(seen[rank]["env"][name] for name in ("GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "ROLE_RANK"))
        for rank in range(6)
    ] == [
        ("0", "0", "1", "0"),
        ("1", "0", "3", "1"),
        ("1", "1", "3", "2"),
        ("1", "2", "3", "3"),
        ("2", "0", "2", "4"),
        ("2", "1", "2", "5"),
    ]
    nodes.touch("finish")
    assert [agent.wait() for agent in agents] == [0, 0, 0]


def test_roles_have_ranks_of_their_own(allocate: Allocate) -> None:
    nodes = allocate(4)
    roles = ["parameter_server", "trainer", "parameter_server", "trainer"]
    workers = [1, 2, 1, 3]
    agents = [
        nodes.start(number + 1, f"--role={roles[number]}", f"--nproc-per-node={workers[number]}") for number in range(4)
    ]
    seen = nodes.seen(0)
    assert [
        tuple(seen[rank]["env"][name] for name in ("ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE")) for rank in range(7)
    ] == [
        ("parameter_server", "0", "2"),
        ("trainer", "0", "5"),
        ("trainer", "1", "5"),
        ("parameter_server", "1", "2"),
        ("trainer", "2", "5"),
        ("trainer", "3", "5"),
        ("trainer", "4", "5"),
    ]
    nodes.touch("finish")
    assert [agent.wait() for agent in agents] == [0, 0, 0, 0]


def test_one_of_the_workers_of_a_node_failing_restarts_all_of_the_group(allocate: Allocate) -> None:
    nodes = allocate(2)
    agents = nodes.start_all("--nproc-per-node=2", "--max-restarts=1")
    before = nodes.seen(0)
    nodes.touch("fail.0.3", "1")
    # Each has begun anew, as it says, and none of those before is there any more.
    assert len(nodes.seen(1)) == 4
    assert not any(is_there(record) for record in before.values())
    nodes.touch("finish")
    assert [agent.wait() for agent in agents] == [0, 0]


def test_local_ranks_can_be_made_virtual(allocate: Allocate) -> None:
    nodes = allocate(1)
    agent = nodes.start(1, "--nproc-per-node=2", "--virtual-local-rank", CUDA_VISIBLE_DEVICES="3,5")
    seen = nodes.seen(0)
    assert [(seen[rank]["env"]["LOCAL_RANK"], seen[rank]["env"]["CUDA_VISIBLE_DEVICES"]) for rank in (0, 1)] == [
        ("0", "3"),
        ("0", "5"),
    ]
    nodes.touch("finish")
    assert agent.wait() == 0


def test_events_of_workers_and_of_the_run_go_to_torch_handlers(allocate: Allocate) -> None:
    nodes = allocate(1)
    agent = nodes.start(1, "--max-restarts=1", "--event-log-handler=console")
    nodes.seen(0)
    nodes.touch("fail.0.0", "1")
    nodes.seen(1)
    nodes.touch("finish")
    assert agent.wait() == 0
    events = [json.loads(line[line.index("{") :]) for line in agent.err.splitlines() if '"source"' in line]
    of_agent = [event["name"] for event in events if event["source"] == "AGENT"]
    assert {name for name in of_agent if "watchdog" in name} == {"watchdog started", "watchdog stopped"}
    assert [name for name in of_agent if "watchdog" not in name] == [
        "slurm_elastic.round_formed",
        "slurm_elastic.round_ended",
        "slurm_elastic.round_formed",
        "slurm_elastic.run_ended",
        "torchelastic.worker.status.SUCCEEDED",
    ]
    of_workers = [
        (event["metadata"]["state"], event["metadata"]["agent_restarts"])
        for event in events
        if event["source"] == "WORKER"
    ]
    assert of_workers == [("START", 0), ("START", 1), ("SUCCEEDED", 1)]


TORCHRUN_WORKER = """
import os, pathlib, sys, time
size, rank, port = (os.environ[name] for name in ("WORLD_SIZE", "RANK", "MASTER_PORT"))
part = pathlib.Path(f".torchrun.{size}.{rank}")
part.write_text(port + " " + os.environ["TORCHELASTIC_RUN_ID"])
part.rename(f"torchrun.{size}.{rank}")
while not pathlib.Path("finish").exists():
    if pathlib.Path("fail").exists():
        sys.exit(3)
    time.sleep(0.02)
"""


def test_torchrun_needs_neither_endpoint_nor_id(allocate: Allocate) -> None:
    nodes = allocate(2)
    (nodes.directory / "train.py").write_text(TORCHRUN_WORKER)
    command = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=slurm", "--nnodes=1:2"]
    first, second = (nodes.command(number, *command, f"--local-addr=127.0.0.{number}", "train.py") for number in (1, 2))
    eventually(lambda: len(list(nodes.directory.glob("torchrun.2.*"))) == 2, nodes.log)
    told = {(nodes.directory / f"torchrun.2.{rank}").read_text() for rank in (0, 1)}
    assert len(told) == 1
    assert told.pop().endswith(" 7")
    # A lost node: the other one goes on without it, at once and uncharged, as --max-restarts is 0.
    second.kill()
    eventually((nodes.directory / "torchrun.1.0").exists, nodes.log)
    nodes.touch("finish")
    assert first.wait() == 0, first.err
    assert (nodes.run_dir / "done.json").exists()


def test_torchrun_that_fails_leaves_the_run_unfinished(allocate: Allocate) -> None:
    nodes = allocate(1)
    (nodes.directory / "train.py").write_text(TORCHRUN_WORKER)
    nodes.touch("fail")
    failing = nodes.command(1, sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=slurm", "train.py")
    assert failing.wait() == 1
    assert "exitcode  : 3" in failing.err
    assert not (nodes.run_dir / "done.json").exists()


def test_a_worker_that_dies_of_a_signal_is_a_failure(allocate: Allocate) -> None:
    nodes = allocate(2)
    agents = nodes.start_all("--max-restarts=1")
    os.kill(nodes.seen(0)[1]["pid"], signal.SIGSEGV)
    assert nodes.seen(1)[0]["env"]["TORCHELASTIC_RESTART_COUNT"] == "1"
    nodes.touch("finish")
    assert [agent.wait() for agent in agents] == [0, 0]
    assert any("exit code -11" in event.get("detail", "") for event in nodes.events())
