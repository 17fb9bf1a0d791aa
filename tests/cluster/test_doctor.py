"""The doctor, on a site with planted faults and beside them what is as it should be."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.cgroups import write_limit
from tests.cluster.jobs import CHECKOUT, Jobs
from tests.cluster.testbed import Cluster

OTHERWISE = """
import platform, time
from slurm_elastic import _version

_version.__version__ = "0.0.1"
platform.python_version = lambda: "3.9.1"
now = time.time
time.time = lambda: now() + 60
"""
"""Of the Python on one node: another release of the package, another release, and a clock that is fast."""
NO_TORCH = "raise ImportError('libcudart.so.13: cannot open shared object file')\n"
SITE_END = "# ---- End of the site block"
LEADER_PORTS, FREE_PORTS = range(10000, 32768), range(32768, 1 << 16)
"""Those that agents take to lead, none of Slurm's own, and those of the kernel's choice."""
DISK = {"run_dir.speed", "run_dir.space"}
TIMING = {*DISK, "network.round_trip"}
"""How fast this machine is just now is no fault of the site."""


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


@contextmanager
def own_name_on_a_loopback(cluster: Cluster, node: str, hosts: Path) -> Iterator[None]:
    """A node's own name is a loopback address to it, as Debian's installer writes it."""
    shown = cluster.command(["cat", "/etc/hosts"], machine=node).stdout.splitlines()
    hosts.write_text("\n".join([f"127.0.1.1 {node}", *(line for line in shown if not line.endswith(f" {node}"))]))
    cluster.command(["mount", "--bind", str(hosts), "/etc/hosts"], user="root", machine=node)
    try:
        yield
    finally:
        cluster.command(["umount", "/etc/hosts"], user="root", machine=node)


@contextmanager
def configured(cluster: Cluster, *changes: tuple[str, str]) -> Iterator[None]:
    """Lines of slurm.conf are others."""
    path, text = cluster.settings.slurm_conf, cluster.settings.slurm_conf.read_text()
    changed = text
    for before, after in changes:
        assert before in changed
        changed = changed.replace(before, after)
    path.write_text(changed)
    cluster.command(["scontrol", "reconfigure"], user="root")
    try:
        yield
    finally:
        path.write_text(text)
        cluster.command(["scontrol", "reconfigure"], user="root")


@contextmanager
def small_and_slow(cluster: Cluster, directory: Path) -> Iterator[Path]:
    """A file system on the controller's machine with 60 MB for the ordinary user, who writes 10 MB a second."""
    image, point = directory / "image", directory / "small"
    point.mkdir()
    with image.open("wb") as file:
        file.truncate(64 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", "-m", "0", str(image)], check=True)
    made = subprocess.run(["losetup", "--find", "--show", str(image)], capture_output=True, text=True, check=True)
    device = Path(made.stdout.strip())
    try:
        cluster.command(["mount", str(device), str(point)], user="root")
        try:
            cluster.command(["chmod", "1777", str(point)], user="root")
            with write_limit(device, 10_000_000):
                yield point
        finally:
            cluster.command(["umount", str(point)], user="root")
    finally:
        subprocess.run(["losetup", "--detach", str(device)], check=True)


def place_site(jobs: Jobs, on_n2: str) -> None:
    """Write the template site.sbatch, whose site block starts agents by a script that spoils them on n2.

    What is below the directory ``other`` comes first in the module path there.
    """
    template = (CHECKOUT / "sbatch_templates/allocation.sbatch").read_text()
    wrapped = template.replace(SITE_END, f"container=(bash {jobs.directory}/wrapper.sh)\n{SITE_END}")
    jobs.write("site.sbatch", wrapped)
    spoil = f"export PYTHONPATH=$PWD/other; {on_n2}"
    jobs.write("wrapper.sh", f'if [ "$SLURMD_NODENAME" = n2 ]; then {spoil}; fi\nexec "$@"\n')
    (jobs.directory / "other").mkdir(mode=0o755)


def doctor(jobs: Jobs, *words: str, machine: str = "ctl") -> tuple[int, list[dict[str, Any]]]:
    """Exit code and findings of ``slurm-elastic doctor --json WORDS``."""
    argv = ["slurm-elastic", "doctor", "--json", *words]
    done = jobs.cluster.command(argv, machine=machine, cwd=jobs.directory, env=jobs.environ, check=False, timeout=120)
    assert "Traceback" not in done.stderr, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)["checks"]
    return done.returncode, found


def level(found: list[dict[str, Any]], check: str, node: str = "") -> str:
    """The level of a check, on a node if it is given."""
    (level,) = [each["level"] for each in found if each["check"] == check and (not node or node in each["nodes"])]
    return str(level)


@pytest.mark.proctrack("cgroup", nightly="linuxproc")
def test_planted_faults_are_found_and_nothing_else(jobs: Jobs, cluster: Cluster, proctrack: str) -> None:
    place_site(jobs, "ulimit -n 1000")
    jobs.write("sitecustomize.py", OTHERWISE).rename(jobs.directory / "other/sitecustomize.py")

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
    (python,) = [each for each in found if each["check"] == "node.python"]
    assert (python["level"], python["nodes"]) == ("limit", ["n2"])
    assert "3.9.1 on n2" in python["found"]
    assert (level(found, "node.clock", "n1"), level(found, "node.clock", "n2")) == ("ok", "limit")
    planted = {"slurm.preemption", "slurm.grace", "node.shared_memory", "node.descriptors", "node.package"}
    planted |= {"node.python", "node.clock"}
    rest = {each["check"]: each for each in found if each["check"] not in planted | TIMING | {"network.gloo"}}
    assert {name: each for name, each in rest.items() if each["level"] in ("limit", "broken")} == {}
    assert {"node.answers", "network.leader_port", "network.free_port", "run_dir.shared"} < set(rest)
    assert f"proctrack/{proctrack}" in rest["slurm.proctrack"]["found"]
    assert level(found, "network.gloo") != "broken"
    assert not (jobs.directory / "elastic-runs").exists()


def test_closed_ports_a_loopback_a_torch_that_fails_and_a_node_without_slurm_are_found(
    jobs: Jobs, cluster: Cluster
) -> None:
    place_site(jobs, "export SLURM_CONF=/nowhere")
    jobs.write("torch.py", NO_TORCH).rename(jobs.directory / "other/torch.py")

    with (
        cluster.closed_ports("n2", "n1", LEADER_PORTS),
        # Not those back, at which srun on n1 waits for n2.
        cluster.closed_ports("n1", "n2", FREE_PORTS),
        own_name_on_a_loopback(cluster, "n2", jobs.directory / "hosts"),
    ):
        code, found = doctor(jobs, "--nodes=2", "--nodelist=n1,n2", "--template=site.sbatch")

    assert code == 2
    wrong = {each["check"]: each for each in found if each["level"] != "ok" and each["check"] not in TIMING}
    clock = wrong.pop("node.clock")
    for check, here, there in (("network.leader_port", "n2", "n1"), ("network.free_port", "n1", "n2")):
        broken = wrong.pop(check)
        assert (broken["level"], broken["nodes"]) == ("broken", [there])
        assert broken["found"] == f"{here} does not reach {there}: no answer within 4 s"
    # Agents give gloo the interface of a node whose name leads to a loopback address.
    assert level(found, "network.address", "n2") == "ok"
    assert "libcudart.so.13" in wrong["node.torch"]["found"]
    assert wrong["network.gloo"]["found"] == "there is no torch that works on n2"
    # Without an answer of Slurm there is no time of the controller.
    assert (clock["level"], clock["nodes"]) == ("unknown", ["n2"])
    assert wrong["node.slurm_commands"]["found"] == "scontrol and squeue get no answer"
    one = {"node.torch", "node.torch_release", "node.slurm_commands"}
    assert set(wrong) == one | {"network.gloo"}
    assert {node for name in one for node in wrong[name]["nodes"]} == {"n2"}


def test_a_slow_network_and_a_job_that_is_cancelled_are_found(jobs: Jobs, cluster: Cluster) -> None:
    with cluster.slow_network("n2", "n1"):
        code, found = doctor(jobs, "--nodes=2", "--nodelist=n1,n2")
    wrong = {each["check"]: each for each in found if each["level"] != "ok" and each["check"] not in DISK}
    assert {name: each["level"] for name, each in wrong.items()} == dict.fromkeys(
        ("network.round_trip", "network.gloo"), "limit"
    )
    assert set(wrong["network.round_trip"]["nodes"]) == {"n1", "n2"}
    assert code == 1

    argv = ["slurm-elastic", "doctor", "--json", "--nodes=2"]
    asked = cluster.popen(argv, cwd=jobs.directory, env=jobs.environ, stderr=subprocess.PIPE)
    cluster.wait_until("the doctor's job does not run", lambda: " R " in jobs.running())
    cluster.command(["scancel", "--user=elastic"], user="root")
    printed, errors = asked.communicate(timeout=60)
    assert asked.returncode == 2, errors
    broken = [each for each in json.loads(printed)["checks"] if each["level"] == "broken"]
    assert {each["check"] for each in broken} == {"node.answers"}
    assert sorted(node for each in broken for node in each["nodes"]) == ["n1", "n2"]


@pytest.mark.nightly
def test_limits_of_slurm_a_small_and_slow_file_system_and_a_controller_that_is_gone_are_found(
    jobs: Jobs, cluster: Cluster
) -> None:
    slurm = (
        ("SlurmdTimeout=10\n", "SlurmdTimeout=0\n"),
        ("UnkillableStepTimeout=120\n", "UnkillableStepTimeout=20\n"),
        ("ProctrackType=proctrack/cgroup\n", "ProctrackType=proctrack/pgid\n"),
    )
    with (
        configured(cluster, *slurm),
        partition_low(cluster, "State=DOWN MaxTime=5", "State=UP MaxTime=INFINITE"),
        small_and_slow(cluster, jobs.directory) as run_dir,
    ):
        code, found = doctor(jobs, f"--run-dir={run_dir}")
    wrong = {each["check"]: each["level"] for each in found if each["level"] in ("limit", "broken")}
    limits = ("slurm.time_limit", "slurm.slurmd_timeout", "slurm.unkillable_step", "slurm.proctrack", *DISK)
    assert wrong == {**dict.fromkeys(limits, "limit"), "slurm.partition": "broken"}
    assert code == 2

    # Not killed: it would come back with jobs whose end it had not saved.
    cluster.cut("ctl")
    try:
        code, found = doctor(jobs, machine="n1")
    finally:
        cluster.heal("ctl")
    assert (level(found, "slurm.controller"), code) == ("broken", 2)
