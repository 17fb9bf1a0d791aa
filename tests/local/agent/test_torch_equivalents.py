"""What torch's own tests say of its agent, where we keep it, and torchrun with our rendezvous.

See test/distributed/elastic/agent/server/test/{local_elastic_agent_test,api_test}.py in torch 2.13.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

from tests.local.agents import Allocation, eventually

Allocate = Callable[..., Allocation]


PLACE = ("GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def test_roles_have_ranks_of_their_own_where_nodes_have_different_numbers_of_workers(allocate: Allocate) -> None:
    nodes = allocate(4)
    roles = ["parameter_server", "trainer", "parameter_server", "trainer"]
    workers = [1, 2, 1, 3]
    agents = [
        nodes.start(number + 1, f"--role={roles[number]}", f"--nproc-per-node={workers[number]}") for number in range(4)
    ]
    seen = nodes.seen(0)
    assert [
        " ".join(seen[rank]["env"][name] for name in ("ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", *PLACE))
        for rank in range(7)
    ] == [
        "parameter_server 0 2 0 0 1",
        "trainer 0 5 1 0 2",
        "trainer 1 5 1 1 2",
        "parameter_server 1 2 2 0 1",
        "trainer 2 5 3 0 3",
        "trainer 3 5 3 1 3",
        "trainer 4 5 3 2 3",
    ]
    nodes.finish(*agents)


def test_local_ranks_can_be_made_virtual(allocate: Allocate) -> None:
    nodes = allocate(1)
    agent = nodes.start(1, "--nproc-per-node=2", "--virtual-local-rank", CUDA_VISIBLE_DEVICES="3,5")
    seen = nodes.seen(0)
    assert [(seen[rank]["env"]["LOCAL_RANK"], seen[rank]["env"]["CUDA_VISIBLE_DEVICES"]) for rank in (0, 1)] == [
        ("0", "3"),
        ("0", "5"),
    ]
    nodes.finish(agent)


def test_events_of_workers_and_of_the_agent_go_to_torch_handlers(allocate: Allocate) -> None:
    nodes = allocate(1)
    agent = nodes.start(1, "--max-restarts=1", "--event-log-handler=console")
    nodes.seen(0)
    nodes.touch("fail.0.0", "1")
    nodes.seen(1)
    nodes.finish(agent)
    events = [json.loads(line[line.index("{") :]) for line in agent.err.splitlines() if '"source"' in line]
    of_agent = {event["name"] for event in events if event["source"] == "AGENT"}
    assert of_agent == {"watchdog started", "watchdog stopped", "torchelastic.worker.status.SUCCEEDED"}
    of_workers = [
        (event["metadata"]["state"], event["metadata"]["agent_restarts"])
        for event in events
        if event["source"] == "WORKER"
    ]
    assert of_workers == [("START", 0), ("START", 1), ("SUCCEEDED", 1)]


TORCHRUN_WORKER = """
import os, pathlib, time
size, rank, port = (os.environ[name] for name in ("WORLD_SIZE", "RANK", "MASTER_PORT"))
part = pathlib.Path(f".torchrun.{size}.{rank}")
part.write_text(port + " " + os.environ["TORCHELASTIC_RUN_ID"])
part.rename(f"torchrun.{size}.{rank}")
while not pathlib.Path("finish").exists():
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
    nodes.finish(first)
    assert (nodes.run_dir / "done.json").exists()
