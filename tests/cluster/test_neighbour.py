"""Another ordinary user on every node tries what it can to harm a training, which does not notice.

What it tries, in docs/security.md. The run's records are in its directory, or in an etcd that asks nobody who it is.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_elastic.rendezvous.records.etcd.config import EtcdConfig, load_config
from slurm_elastic.rendezvous.records.etcd.server import find_binary
from slurm_elastic.rendezvous.transport.session import Role, Session
from slurm_elastic.slurm.ports import ephemeral_low, port_sequence
from tests.cluster.conftest import remove_shared_directory, shared_directory
from tests.cluster.jobs import CHECKOUT, Job, Jobs
from tests.cluster.testbed import network
from tests.cluster.testbed.settings import CONTROLLER, NEIGHBOUR

NODES = ("n1", "n2", "n3", "n4")
EPOCHS = 2
PYTHON = "/usr/bin/python3.11"
"""Of all machines, whatever their Slurm's Debian (testbed/boot.sh); the environment of jobs is the other user's."""
LINES = 50
"""Fewer than so many lines may tell what was dropped."""


@pytest.fixture
def reports(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A directory of the neighbour's."""
    directory = shared_directory(f"{request.node.name}-reports")
    directory.chmod(0o777)
    yield directory
    remove_shared_directory(directory)


@pytest.fixture(params=["files", "etcd"])
def etcd(request: pytest.FixtureRequest, jobs: Jobs) -> Iterator[EtcdConfig | None]:
    """An etcd on the controller's machine that is open to all; None for records in files."""
    if request.param == "files":
        yield None
        return
    settings = jobs.cluster.settings
    url, log = f"http://{settings.address(CONTROLLER)}:2379", jobs.directory / "etcd.log"
    command = ["nsenter", f"--net={network.NAMESPACES / settings.namespace(CONTROLLER)}", "--", str(find_binary())]
    options = [f"--data-dir={jobs.directory / 'etcd'}", f"--listen-client-urls={url}", f"--advertise-client-urls={url}"]
    with subprocess.Popen([*command, *options], stdout=log.open("w"), stderr=subprocess.STDOUT) as process:
        try:
            jobs.cluster.wait_until("etcd does not start", lambda: "ready to serve client requests" in log.read_text())
            yield load_config(url.replace("http", "etcd"))
        finally:
            process.kill()


@pytest.mark.nightly
def test_a_neighbour_changes_nothing(jobs, etcd, reports):
    jobs.place(CHECKOUT / "docs/examples/digits.py")
    jobs.place(CHECKOUT / "docs/examples/count_samples.py")
    program = jobs.place(CHECKOUT / "tests/local/neighbour.py")
    training = f"digits.py --epochs {EPOCHS} --step-time 0.05 --checkpoint-dir . --record records"
    held = ["--hold", "--nodes=4", "elastic.sbatch", "--health-port=0"]
    job = jobs.submit(*held, *([f"--rdzv-endpoint={etcd}"] if etcd else []), *training.split())
    ports = port_sequence(str(job.id), 0, ephemeral_low())
    for node in NODES:
        greeting = Session(Role.AGENT, bytes(32), f"{job.id}.0", agent=f"{node}/1.0/1").start().hex()
        keys = f"http://{etcd.endpoints[0]}{etcd.run_prefix(str(job.id))}" if etcd else ""
        words = [job.run_dir, node, reports / "over", reports / f"{node}.json", keys, greeting, *ports]
        jobs.cluster.popen(
            [PYTHON, str(program), *map(str, words)],
            user=NEIGHBOUR,
            machine=node,
            stdout=(reports / f"{node}.log").open("w"),
        )
    job.wait_until("the neighbour does not begin", lambda: all((reports / f"{n}.json").exists() for n in NODES))
    jobs.cluster.command(["scontrol", "release", str(job.id)])

    job.wait_for("COMPLETED", timeout=120.0)
    (reports / "over").touch()
    job.cluster.wait_until("the neighbour does not end", lambda: all(_report(reports, n) for n in NODES))

    did: Counter[str] = Counter()
    for node in NODES:
        report = _report(reports, node)
        assert report["changed"] == []
        did.update(report["did"])
    print(dict(did))
    assert (did["etcd 200"] > 100) == (etcd is not None)
    assert_every_sample_came_once(job)
    assert job.tables() == [list(NODES)]
    assert [job.events(kind) for kind in ("node_lost", "worker_failed")] == [[], []]
    assert job.rounds()[0]["endpoint"]["port"] not in ports
    dropped = [line for line in job.lines if "dropped" in line]
    assert 0 < len(dropped) < LINES
    assert any("dropped the etcd key" in line for line in dropped) == (etcd is not None)
    assert len(job.lines) < LINES + 4 * EPOCHS
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", job.output)


def assert_every_sample_came_once(job: Job) -> None:
    command = [sys.executable, "count_samples.py", "records", "checkpoint.pt"]
    counted = subprocess.run(command, cwd=job.directory, capture_output=True, text=True)
    assert counted.stdout.splitlines() == [
        f"epoch {epoch}: 1437 of 1437 samples once, exactly once" for epoch in range(EPOCHS)
    ], counted.stderr


def _report(reports: Path, node: str) -> dict[str, object]:
    return json.loads((reports / f"{node}.json").read_text())
