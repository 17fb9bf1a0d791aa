"""The health port of real agents: before, during and after rounds."""

from __future__ import annotations

import json
import signal
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.local.agents import WORKER, Allocation, eventually

Allocate = Callable[..., Allocation]


def target(nodes: Allocation, number: int) -> str:
    """Where the health port of a node is."""
    path = nodes.run_dir / "health" / f"{nodes.nodes[number - 1]}.{nodes.job_id}.json"
    eventually(path.exists, nodes.log)
    ((group,),) = [json.loads(path.read_text())]
    assert group["labels"] == {"slurm_job": nodes.job_id}
    return group["targets"][0]


def ask(where: str, page: str, token: str = "") -> tuple[int, str]:
    request = urllib.request.Request(f"http://{where}{page}")
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=20) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def status(where: str) -> dict[str, Any]:
    return json.loads(ask(where, "/status")[1])


def listeners(where: str) -> set[str]:
    """The inodes of the sockets that listen there, proc_net_tcp(5)."""
    host, port = where.split(":")
    local = f"{int.from_bytes(socket.inet_aton(host), sys.byteorder):08X}:{int(port):04X}"
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {fields[9] for fields in lines if (fields[1], fields[3]) == (local, "0A")}


def test_it_answers_before_the_first_round_through_a_change_and_to_the_end(allocate: Allocate) -> None:
    nodes = allocate(2)
    first = nodes.start(1, "--nnodes=2", "--nproc-per-node=2", "--max-restarts=2")
    where = target(nodes, 1)
    assert ask(where, "/healthz") == (200, "alive\n")
    eventually(lambda: ask(where, "/readyz") == (503, "joining\n"), nodes.log)
    assert status(where)["round"] is None

    failed: list[str] = []
    over = threading.Event()

    def keep_asking() -> None:
        while not over.is_set():
            try:
                if ask(where, "/healthz")[0] != 200:
                    failed.append("not alive")
            except OSError as error:
                failed.append(str(error))
            time.sleep(0.005)

    asking = threading.Thread(target=keep_asking)
    asking.start()
    second = nodes.start(2, "--nnodes=2", "--nproc-per-node=2", "--max-restarts=2")
    seen = nodes.seen(0)
    eventually(lambda: ask(where, "/readyz") == (200, "training in round 0\n"), nodes.log)
    found = status(where)
    assert found["round"]["ranks"] == [0, 1]
    assert found["round"]["nodes"] == "127.0.0.[1-2]"
    assert [worker["pid"] for worker in found["workers"]] == [seen[rank]["pid"] for rank in (0, 1)]
    assert (found["leads"], found["restarts_left"]) == (True, 2)
    other = target(nodes, 2)
    # Its worker may be seen before it has told that itself.
    eventually(lambda: status(other)["state"] == "training", nodes.log)
    found = status(other)
    assert (found["leads"], found["leader"], found["round"]["ranks"]) == (False, nodes.nodes[0], [2, 3])
    stacks = ask(where, "/stacks", (nodes.run_dir / "health-token").read_text().strip())[1]
    assert all(f"process {seen[rank]['pid']}," in stacks for rank in (0, 1)), stacks
    assert ask(where, "/stacks")[0] == 401

    nodes.touch("fail.0.3", "1")
    nodes.seen(1)
    eventually(lambda: status(where)["round"]["number"] == 1 and status(where)["state"] == "training", nodes.log)
    assert (status(where)["restarts"], status(where)["restarts_left"]) == (1, 1)
    metrics = ask(where, "/metrics")[1]
    assert 'slurm_elastic_rounds_total{node="127.0.0.1",reason="worker_failed",run="7"} 1.0' in metrics
    over.set()
    asking.join()
    assert failed == []
    listening = listeners(where)
    assert listening
    nodes.finish(first, second)
    assert list((nodes.run_dir / "health").iterdir()) == []
    # By now the port may be somebody else's.
    assert not listening & listeners(where)


def test_bound_elsewhere_it_takes_the_token_and_two_jobs_share_a_node(allocate: Allocate, tmp_path: Path) -> None:
    nodes, token = allocate(1), "0123456789abcdef"
    (tmp_path / "token").write_text(token)
    (tmp_path / "token").chmod(0o600)
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        agent = nodes.start(
            1,
            "--health-bind=0.0.0.0",
            f"--health-token-file={tmp_path / 'token'}",
            script=(str(WORKER), "ignore-term"),
            TORCHELASTIC_HEALTH_CHECK_PORT=str(port),
        )
        agent.expect(f"health port {port} is in use on this node; the agent takes a free one")
        where = target(nodes, 1)
    nodes.seen(0)
    assert where.startswith("127.0.0.1:")
    assert [ask(where, page)[0] for page in ("/healthz", "/status", "/metrics")] == [200, 401, 401]
    assert [ask(where, page, token)[0] for page in ("/status", "/metrics", "/stacks")] == [200, 200, 200]
    agent.signal(signal.SIGTERM)
    # Its worker has not ended, so it is still there.
    eventually(lambda: "node_left" in ask(where, "/status", token)[1], nodes.log)
    nodes.touch("finish")
    assert agent.wait() == 75
    assert token not in agent.err


def test_it_can_be_switched_off(allocate: Allocate) -> None:
    nodes = allocate(1)
    agent = nodes.start(1, "--no-health")
    nodes.seen(0)
    assert not (nodes.run_dir / "health").exists()
    assert not (nodes.run_dir / "health-token").exists()
    nodes.finish(agent)
