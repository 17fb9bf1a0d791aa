"""The doctor, on a site with planted faults and beside them what is as it should be."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.cluster.jobs import CHECKOUT, Jobs
from tests.cluster.testbed import Cluster

WRAPPER = """\
if [ "$SLURMD_NODENAME" = n2 ]; then
  ulimit -n 1000
  export PYTHONPATH=$PWD/other
fi
exec "$@"
"""
OTHER_VERSION = "from slurm_elastic import _version\n_version.__version__ = '0.0.1'\n"
SITE_END = "# ---- End of the site block"


@contextmanager
def partition_low(cluster: Cluster, changed: str, restored: str) -> Iterator[None]:
    """Partition low is configured otherwise."""
    update = ["scontrol", "update", "PartitionName=low"]
    cluster.command([*update, *changed.split()], user="root")
    try:
        yield
    finally:
        cluster.command([*update, *restored.split()], user="root")


@contextmanager
def no_shared_memory(cluster: Cluster, node: str) -> Iterator[None]:
    """Nothing can be written to /dev/shm on a node."""
    cluster.command(["mount", "-t", "tmpfs", "-o", "ro", "none", "/dev/shm"], user="root", machine=node)
    try:
        yield
    finally:
        cluster.command(["umount", "/dev/shm"], user="root", machine=node)


def doctor(jobs: Jobs, *words: str) -> tuple[int, list[dict[str, Any]]]:
    """Exit code and findings of ``slurm-elastic doctor --json WORDS``."""
    argv = ["slurm-elastic", "doctor", "--json", *words]
    done = jobs.cluster.command(argv, cwd=jobs.directory, env=jobs.environ, check=False, timeout=120)
    assert "Traceback" not in done.stderr, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)["checks"]
    return done.returncode, found


def level(found: list[dict[str, Any]], check: str, node: str = "") -> str:
    """The level of a check, on a node if it is given."""
    (level,) = [each["level"] for each in found if each["check"] == check and (not node or node in each["nodes"])]
    return str(level)


@pytest.mark.proctrack("cgroup", "linuxproc")
def test_planted_faults_are_found_and_nothing_else(jobs: Jobs, cluster: Cluster, proctrack: str) -> None:
    template = (CHECKOUT / "sbatch_templates/allocation.sbatch").read_text()
    wrapped = template.replace(SITE_END, f"container=(bash {jobs.directory}/wrapper.sh)\n{SITE_END}")
    jobs.write("site.sbatch", wrapped)
    jobs.write("wrapper.sh", WRAPPER)
    (jobs.directory / "other").mkdir(mode=0o755)
    jobs.write("sitecustomize.py", OTHER_VERSION).rename(jobs.directory / "other/sitecustomize.py")

    with (
        no_shared_memory(cluster, "n2"),
        partition_low(cluster, "PreemptMode=CANCEL GraceTime=0", "PreemptMode=REQUEUE GraceTime=15"),
    ):
        code, found = doctor(jobs, "--nodes=2", "--nodelist=n1,n2", "--template=site.sbatch", "--checkpoint=41")

    assert code == 2
    assert (level(found, "slurm.preemption"), level(found, "slurm.grace")) == ("limit", "limit")
    assert level(found, "node.shared_memory", "n1") == "ok"
    assert level(found, "node.shared_memory", "n2") == "broken"
    assert level(found, "node.descriptors", "n1") == "ok"
    assert level(found, "node.descriptors", "n2") == "limit"
    (package,) = [each for each in found if each["check"] == "node.package"]
    assert (package["level"], package["nodes"]) == ("limit", ["n2"])
    assert "0.0.1 on n2" in package["found"]
    planted = {"slurm.preemption", "slurm.grace", "node.shared_memory", "node.descriptors", "node.package"}
    # How fast this machine is just now is no fault of the site.
    planted |= {"run_dir.speed", "run_dir.space", "network.round_trip", "network.gloo"}
    rest = {each["check"]: each for each in found if each["check"] not in planted}
    assert {name: each for name, each in rest.items() if each["level"] in ("limit", "broken")} == {}
    assert {"node.answers", "network.leader_port", "network.free_port", "run_dir.shared", "network.clocks"} < set(rest)
    assert f"proctrack/{proctrack}" in rest["slurm.proctrack"]["found"]
    assert level(found, "network.gloo") != "broken"
    assert not (jobs.directory / "elastic-runs").exists()
