"""Jobs that share nodes, and what else a site may do to a job."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import pytest

from slurm_elastic.slurm import port_sequence
from tests.cluster.jobs import SRUN, Job, on
from tests.cluster.testbed import Cluster

RESERVED = range(21000, 22000)
"""Slurm reserves some of these for each step, in turn; see slurm.conf of the test cluster."""

STRANGER = """
import socketserver, sys, threading
class Stranger(socketserver.BaseRequestHandler):
    def handle(self):
        self.request.sendall(b"SSH-2.0-nobody\\r\\n")
for port in map(int, sys.argv[1:]):
    try:
        server = socketserver.ThreadingTCPServer(("", port), Stranger)
    except OSError:
        continue
    threading.Thread(target=server.serve_forever).start()
print("ready", flush=True)
"""
"""Listens on every port that is still free."""


@contextmanager
def foreign_listener(cluster: Cluster, node: str, ports: Iterable[int]) -> Iterator[None]:
    """Somebody else's program on those of the ports that are free."""
    argv = ["/usr/bin/python3", "-c", STRANGER, *map(str, ports)]
    with cluster.popen(argv, user="root", machine=node) as program:
        try:
            assert program.stdout.readline() == "ready\n"
            yield
        finally:
            # Not the process that was started here, which merely entered the node.
            cluster.command(["pkill", "-f", "SSH-2.0-nobody"], user="root", machine=node)


def leader_port(job: Job) -> int | None:
    """Where the run's leader listens."""
    path = job.run_dir / f"endpoints/{job.id}.0.json"
    return int(json.loads(path.read_text())["port"]) if path.exists() else None


def derived_ports(cluster: Cluster, job: Job) -> tuple[int, ...]:
    """The ports that the job's leader tries when those that Slurm reserved are in use."""
    local = cluster.command(["cat", "/proc/sys/net/ipv4/ip_local_port_range"], machine="n1").stdout
    return port_sequence(str(job.id), 0, int(local.split()[0]))


def test_two_runs_share_nodes_and_one_finds_its_ports_taken(jobs):
    # As a site that gives out parts of nodes adapts the template.
    template = (jobs.directory / "elastic.sbatch").read_text()
    jobs.write("elastic.sbatch", template.replace("#SBATCH --exclusive", "#SBATCH --cpus-per-task=2"))
    runs = []
    for name in ("one", "other"):
        jobs.cluster.command(["mkdir", name], cwd=jobs.directory)
        argv = ("--hold", *on("n1", "n2"), "../elastic.sbatch", "../train.py")
        runs.append(jobs.submit(*argv, cwd=jobs.directory / name))
    first, second = runs
    jobs.cluster.command(["scontrol", "release", str(first.id)])
    first.wait_until("no leader", lambda: leader_port(first) is not None)
    port = leader_port(first)
    assert port in RESERVED
    taken, free, *_ = derived_ports(jobs.cluster, second)
    with foreign_listener(jobs.cluster, "n1", [*range(port, port + 8), taken]):
        jobs.cluster.command(["scontrol", "release", str(second.id)])

        # Both train at once: neither ends before it is told to.
        for job in runs:
            job.wait_for_steps(0, ["n1", "n2"])
        for job in runs:
            job.say_enough()

        for job in runs:
            job.wait_for("COMPLETED")
    assert leader_port(second) == free
    assert [job.tables() for job in runs] == [[["n1", "n2"]], [["n1", "n2"]]]


@pytest.mark.nightly
def test_torchrun_needs_neither_endpoint_nor_id(jobs):
    # The command torchrun is no more than this.
    options = "--rdzv-backend=slurm --nnodes=2 --nproc-per-node=1 --max-restarts=1 --log-dir=logs"
    torchrun = f"python -m torch.distributed.run {options}"
    jobs.write(
        "job.sh", f"#!/bin/bash\n#SBATCH --exclusive\nsrun {torchrun} train.py --steps=6 --fail=1 --fail-times=1\n"
    )

    job = jobs.submit(*on("n1", "n2"), "job.sh")

    job.wait_for("COMPLETED")
    assert {(e["rank"], e["node"]) for e in job.steps()} == {(0, "n1"), (1, "n2")}
    # torch's own agent counts for itself; the other one comes to the new round without a failure, or with one.
    assert {e["restarts"] for e in job.steps() if e["step"] == 6 and e["rank"] == 1} == {1}
    assert job.tables() == [["n1", "n2"], ["n1", "n2"]]


@pytest.mark.parametrize("address", [pytest.param("", marks=pytest.mark.nightly), "127.0.1.1"])
def test_workers_find_each_other_where_the_names_of_hosts_do_not_lead_to_them(jobs, address):
    names = {node: f"{node}.nowhere.example" for node in ("n1", "n2")}
    hosts = jobs.cluster.settings.state / "hosts"
    before = hosts.read_text()
    try:
        if address:
            # In place: the file is mounted on each machine.
            hosts.write_text(before + "".join(f"{address} {name}\n" for name in names.values()))
        for node, name in names.items():
            jobs.cluster.command(["hostname", name], user="root", machine=node)

        job = jobs.submit(*on("n1", "n2"), "elastic.sbatch", "train.py", "--steps=3")

        job.wait_for("COMPLETED")
    finally:
        hosts.write_text(before)
        for node in names:
            jobs.cluster.command(["hostname", node], user="root", machine=node)
    assert job.trained_on(0) == ["n1", "n2"]


def test_an_agent_does_without_slurm_commands(jobs, environment):
    jobs.write("job.sh", f"#!/bin/bash\n{SRUN} env PATH={environment} slurm-elastic agent train.py --steps=3\n")

    job = jobs.submit(*on("n1"), "job.sh")

    job.wait_for("COMPLETED")
    assert job.trained_on(0) == ["n1"]
    assert "scontrol" in job.output
    assert "Traceback" not in job.output
