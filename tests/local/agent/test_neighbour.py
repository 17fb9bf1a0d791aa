"""Another ordinary user of the machine tries what it can to harm a training, which does not notice."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_elastic.rendezvous.records.etcd.server import EtcdServer
from slurm_elastic.rendezvous.transport.session import Role, Session
from slurm_elastic.slurm.address import ephemeral_low, port_sequence
from tests.local.agents import HANG, ROOT, Allocation, eventually

PYTHONS = [f"/usr/bin/python{sys.version_info[0]}.{sys.version_info[1]}", "/usr/bin/python3"]
PYTHON = next(filter(lambda python: os.access(python, os.X_OK), PYTHONS), None)
STEPS = 45
TRAIN = f"""
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
with open(f"steps.{{dist.get_rank()}}", "a") as log:
    for step in range({STEPS}):
        dist.all_reduce(torch.ones(1))
        print(step, file=log, flush=True)
        time.sleep(0.02)
dist.destroy_process_group()
"""
LINES = 40
"""An agent says fewer lines than this; each one that has led names what it has dropped."""


@pytest.fixture
def nodes() -> Iterator[Allocation]:
    """Give an allocation whose directory every user can look into, unlike pytest's."""
    if os.geteuid() != 0:
        pytest.skip("only root becomes another user")
    if PYTHON is None:
        pytest.skip("no /usr/bin/python3, which every user can run")
    directory = Path(tempfile.mkdtemp(prefix="slurm-elastic-test-", dir="/var/tmp"))
    directory.chmod(0o755)
    # A job that no other test has, as its ports follow from its id.
    allocation = Allocation(directory, 3, job_id=str(100_000 + os.getpid()))
    yield allocation
    allocation.close()
    shutil.rmtree(directory)


@pytest.fixture
def etcd() -> Iterator[EtcdServer]:
    """An etcd that asks nobody who it is."""
    with EtcdServer() as server:
        yield server


def test_a_neighbour_changes_nothing(nodes: Allocation, etcd: EtcdServer) -> None:
    reports = nodes.directory / "reports"
    reports.mkdir()
    reports.chmod(0o777)
    report = reports / "report.json"
    ports = port_sequence(nodes.job_id, 0, ephemeral_low())
    names = Path("/dev/shm")
    before = set(names.glob("slurm-elastic-*"))
    user = ["setpriv", "--reuid=64999", "--regid=64999", "--clear-groups", "--"]
    program = nodes.directory / "neighbour.py"
    program.write_bytes((ROOT / "tests/local/neighbour.py").read_bytes())
    program.chmod(0o644)
    greeting = Session(Role.AGENT, bytes(32), f"{nodes.job_id}.0", agent="127.0.0.9/1.0/1").start().hex()
    keys = f"http://{etcd.config.endpoints[0]}{etcd.config.run_prefix(nodes.job_id)}"
    words = [program, nodes.run_dir, nodes.nodes[0], reports / "over", report, keys, greeting, *ports]
    environment = {"PATH": os.environ["PATH"]}
    with subprocess.Popen([*user, str(PYTHON), *map(str, words)], env=environment) as neighbour:
        try:
            eventually(report.exists)
            nodes.touch("train.py", TRAIN)
            agents = nodes.start_all("--health-port=0", f"--rdzv-endpoint={etcd.config}", script=["train.py"])
            codes = [agent.wait() for agent in agents]
            (reports / "over").touch()
            assert neighbour.wait(HANG) == 0
        finally:
            neighbour.kill()
            for path in set(names.glob("slurm-elastic-*")) - before:
                if path.is_symlink():
                    path.unlink()

    found = json.loads(report.read_text())
    assert codes == [0, 0, 0], nodes.log()
    assert found["changed"] == []
    assert len(found["did"]) > 20
    assert found["did"]["etcd 200"] > 50
    rounds = [nodes.nodes_of_round(number) for number in range(nodes.rounds())]
    assert rounds == [list(nodes.nodes)], nodes.log()
    assert not [event for event in nodes.events() if event["event"] in ("node_lost", "worker_failed")]
    for rank in range(3):
        assert [*map(int, (nodes.directory / f"steps.{rank}").read_text().split())] == [*range(STEPS)]
    said = nodes.log()
    assert "dropped the etcd key" in said
    assert all(len(agent.err.splitlines()) < LINES for agent in agents), said
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", said)
