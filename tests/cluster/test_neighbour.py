"""Another ordinary user on every node tries what it can to harm a training, which does not notice.

What it tries, in docs/security.md. The run's records are in its directory, or in an etcd that asks nobody who it is.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_elastic.rendezvous.records.etcd.config import EtcdConfig, load_config
from slurm_elastic.rendezvous.records.etcd.server import find_binary
from tests.cluster.conftest import remove_shared_directory, shared_directory
from tests.cluster.jobs import CHECKOUT, Job, Jobs
from tests.cluster.neighbours import Neighbours
from tests.cluster.testbed import network
from tests.cluster.testbed.settings import CONTROLLER

NODES = ("n1", "n2", "n3", "n4")
EPOCHS = 2
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
    training = f"digits.py --epochs {EPOCHS} --step-time 0.05 --checkpoint-dir . --record records"
    held = ["--hold", "--nodes=4", "elastic.sbatch", "--health-port=0"]
    job = jobs.submit(*held, *([f"--rdzv-endpoint={etcd}"] if etcd else []), *training.split())
    neighbours = Neighbours(jobs, job, reports, etcd)
    for node in NODES:
        neighbours.start(node)
    job.wait_until("the neighbour does not begin", neighbours.begun)
    jobs.cluster.command(["scontrol", "release", str(job.id)])

    job.wait_for("COMPLETED", timeout=120.0)
    did, changed = neighbours.end()
    print(dict(did))
    assert changed == []
    assert (did["etcd 200"] > 100) == (etcd is not None)
    assert_every_sample_came_once(job)
    assert job.tables() == [list(NODES)]
    assert [job.events(kind) for kind in ("node_lost", "worker_failed")] == [[], []]
    assert job.rounds()[0]["endpoint"]["port"] not in neighbours.ports
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
