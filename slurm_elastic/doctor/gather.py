"""Gathers the facts about this machine, the run directory, Slurm and etcd."""

from __future__ import annotations

import os
import platform
import re
import resource
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from slurm_elastic._version import __version__
from slurm_elastic.agent.node.node_check import unwritable
from slurm_elastic.agent.node.site_command import run_site_command
from slurm_elastic.agent.workers.torch_hooks import require_torch
from slurm_elastic.doctor.facts import EtcdFacts, GpuFacts, NodeFacts, RunDirFacts, SlurmFacts, TorchFacts
from slurm_elastic.errors import SlurmElasticError, UsageError, did_you_mean
from slurm_elastic.rendezvous.records.etcd.config import EtcdConfig
from slurm_elastic.rendezvous.transport.session import PROTOCOL
from slurm_elastic.rundir import RunDir
from slurm_elastic.slurm import (
    AddressPreference,
    Controller,
    choose_address,
    data_interface,
    gather_facts,
    gloo_interface,
    resolve,
)

_LARGE = 32 << 20
"""Bytes of the file by which the speed of writing is measured."""
_RECORDS = 5
"""Records that are written; the fastest counts, as a file server has other users."""
_SHM = Path("/dev/shm")
_DRIVER = Path("/proc/driver/nvidia/version")
_RELEASE = r"\b[0-9]+\.[0-9.]+"
"""That of the driver in ``NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  ...``."""
_MATRIX = 1024
_ETCD_SECONDS = 10.0
_ANSWER = 10.0
"""Seconds for df and quota: a file server that does not answer is no reason to wait longer."""
_QUOTA_COLUMNS = 8


def slurm_facts(controller: Controller) -> SlurmFacts:
    """Ask Slurm's controller.

    Raises:
        UsageError: This machine has no scontrol.
    """
    if shutil.which("scontrol") is None:
        raise UsageError("no scontrol in PATH; run the doctor on a machine of the cluster, such as its login node")
    config = controller.config()
    if config is None:
        return SlurmFacts()
    # Without slurmdbd sacctmgr fails after a while.
    qos = controller.qos() if config.text("PreemptType") == "preempt/qos" else ()
    return SlurmFacts(config, controller.partitions() or (), qos or ())


def require_partition(facts: SlurmFacts, partition: str, nodes: int | None) -> None:
    """Refuse a partition that Slurm does not know, and more nodes than it has: the job would wait for ever.

    Raises:
        UsageError: There is no such partition, or it is too small.
    """
    known = [view.name for view in facts.partitions]
    for name in partition.split(","):
        if name and known and name not in known:
            fix = did_you_mean(name, known, otherwise=f"there are {', '.join(known)}")
            raise UsageError(f"--partition {name}: Slurm knows no such partition; {fix}")
    chosen = facts.chosen(partition)
    most = max((partition.nodes for partition in chosen), default=None)
    if nodes is not None and most is not None and nodes > most:
        raise UsageError(f"--nodes {nodes}: partition {chosen[0].name} has {most}; give fewer, or another --partition")


def node_facts(
    node: str, preference: AddressPreference, controller: Controller, *, job_gpus: int = 0, toward: str | None = None
) -> NodeFacts:
    """Look at this machine; this imports torch, which takes seconds.

    Args:
        node: Slurm's name of this machine.
        toward: Another node, to which routes lead.
    """
    torch = _torch_facts()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    config, now = controller.config(), time.time()
    return NodeFacts(
        node=node,
        python=platform.python_version(),
        executable=sys.executable,
        package=__version__,
        protocol=PROTOCOL,
        torch=torch,
        gpus=tuple(_gpu_facts()) if torch.cuda else (),
        job_gpus=job_gpus,
        nvidia_driver=_in_file(_DRIVER, _RELEASE),
        shared_memory=shutil.disk_usage(_SHM).free if _SHM.is_dir() else 0,
        shared_memory_error="; ".join(unwritable([_SHM])),
        descriptors_soft=soft,
        descriptors_hard=hard,
        locked_memory=locked,
        controller_offset=now - config.now if config else None,
        has_squeue=controller.own_jobs() is not None,
        **_address(node, preference, controller, toward),
    )


def run_dir_facts(run_dir: RunDir) -> RunDirFacts:
    """Open the directory of the doctor's own run, which the caller removes, as an agent does, and measure it."""
    base = run_dir.path.parent.parent
    try:
        run_dir.open()
        run_dir.secret()
        times = [_seconds(lambda: run_dir.publish_record({}, "record")) for _ in range(_RECORDS)]
        first, second = run_dir.claim_record({}, "claim"), run_dir.claim_record({}, "claim")
        took = _seconds(lambda: _write(run_dir.path / "large"))
        free = shutil.disk_usage(run_dir.path).free
    except SlurmElasticError as error:
        return RunDirFacts(str(base), error=str(error))
    except OSError as error:
        return RunDirFacts(str(base), error=f"{error.filename}: {error.strerror}; give another by --run-dir")
    point, kind = _mount(run_dir.path)
    quota = ["quota", "--no-wrap", "--raw-grace", f"--filesystem={point}"]
    if kind == "lustre":
        quota = ["lfs", "quota", "-q", "-u", str(os.geteuid()), point]
    return RunDirFacts(
        path=str(base),
        is_exclusive=first and not second,
        filesystem=kind,
        free=free,
        # quota(1) ends with 1 when a limit is exceeded.
        quota_left=quota_left(run_site_command(shlex.join(quota), _ANSWER).output),
        write_speed=_LARGE / took,
        record_seconds=min(times),
    )


def etcd_facts(config: EtcdConfig) -> EtcdFacts:
    """Ask etcd as an agent does at its start; nothing is written."""
    from slurm_elastic.rendezvous.records.etcd.client import EtcdClient

    endpoint = ",".join(str(address) for address in config.endpoints)
    try:
        with EtcdClient(config) as client:
            limited = client.limited(_ETCD_SECONDS)
            limited.connect()
            return EtcdFacts(endpoint, seconds=_seconds(lambda: limited.connect()))
    except SlurmElasticError as error:
        return EtcdFacts(endpoint, error=str(error))


def _torch_facts() -> TorchFacts:
    try:
        require_torch()
    except UsageError as error:
        return TorchFacts(error=str(error))
    import torch

    return TorchFacts(release=str(torch.__version__), cuda=torch.version.cuda or "")


def _gpu_facts() -> Iterator[GpuFacts]:
    """Multiply two matrices of small whole numbers on each GPU, which is exact in single precision."""
    import torch

    left = torch.arange(_MATRIX * _MATRIX, dtype=torch.float32).remainder(7).view(_MATRIX, _MATRIX)
    right = left.t().contiguous()
    expected = left @ right
    for index in range(torch.cuda.device_count() if _DRIVER.exists() else 0):
        name = f"GPU {index}"
        try:
            name = torch.cuda.get_device_name(index)
            made = (left.to(index) @ right.to(index)).cpu()
        except RuntimeError as error:
            yield GpuFacts(name, str(error).splitlines()[0])
            continue
        wrong = int((made != expected).sum())
        yield GpuFacts(name, f"{wrong} of {made.numel()} elements are wrong" if wrong else "")


def _in_file(path: Path, pattern: str) -> str:
    """Return the first text in a file that a pattern matches; empty if there is none, or no such file."""
    try:
        match = re.search(pattern, path.read_text())
    except OSError:
        return ""
    return match[0] if match else ""


def _address(node: str, preference: AddressPreference, controller: Controller, toward: str | None) -> dict[str, Any]:
    """Return the facts of a node that concern its address."""
    facts = gather_facts(preference, node, controller=controller, toward=toward)
    interfaces = {name: address for name, address in facts.interfaces.items() if address}
    told = os.environ.get("GLOO_SOCKET_IFNAME", "")
    try:
        name = choose_address(preference, facts)
    except UsageError as error:
        return {"address_error": str(error), "collective_interface": told, "interfaces": interfaces}
    interface = data_interface(preference, facts) or gloo_interface(preference, facts) or told
    return {"address": resolve(name) or name, "collective_interface": interface, "interfaces": interfaces}


def _write(path: Path) -> None:
    block = os.urandom(1 << 20)
    with path.open("wb", buffering=0) as file:
        for _ in range(_LARGE // len(block)):
            file.write(block)
        os.fsync(file.fileno())


def _seconds(call: Callable[[], Any]) -> float:
    begin = time.monotonic()
    call()
    return max(time.monotonic() - begin, 1e-9)


def _mount(path: Path) -> tuple[str, str]:
    """Return mount point and type of the file system of a path; empty if df(1) does not tell."""
    answer = run_site_command(shlex.join(("df", "--output=target,fstype", str(path))), _ANSWER)
    *_, line = answer.output.splitlines() if answer.exit_code == 0 else [""]
    point, _, kind = line.rpartition(" ")
    return point.strip(), kind


def quota_left(output: str) -> int | None:
    """Return the bytes that are left by the last line of quota(1) or lfs-quota(1); None if it shows no limit.

    The last eight columns of both: blocks of 1 KiB, soft limit, hard limit, grace, and the same of files. Above a limit
    the blocks have an asterisk. lfs puts numbers that it is not sure of in brackets, and behind a mount point of more
    than 15 characters it begins a new line (print_quota in lustre/utils/lfs.c).
    """
    for line in reversed(output.splitlines()):
        columns = [word.strip("*[]") for word in line.split()[-_QUOTA_COLUMNS:]]
        if len(columns) == _QUOTA_COLUMNS and all(column.isdecimal() for column in columns[:3]):
            used, *limits = (int(column) for column in columns[:3])
            # The soft limit may be exceeded for a while.
            limit = min((size for size in limits if size), default=None)
            return None if limit is None else max(0, limit - used) * 1024
    return None
