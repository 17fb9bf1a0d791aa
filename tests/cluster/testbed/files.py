"""The files of a cluster that is about to start, and what must be installed before that."""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import stat
from pathlib import Path

from . import accounting, config
from .errors import TestbedError
from .settings import STATE, USER, Settings

_BOOT_SCRIPT = Path(__file__).with_name("boot.sh")


def check_prerequisites(settings: Settings) -> None:
    """Raise TestbedError, naming the fix, where this machine cannot run such a cluster."""
    if os.geteuid() != 0:
        raise TestbedError("the test cluster needs root: its nodes are namespaces")
    programs = ["usr/sbin/slurmctld", "usr/sbin/slurmd", "usr/bin/sbatch", "usr/sbin/munged", "usr/bin/tini"]
    missing = [settings.root / program for program in programs if not (settings.root / program).exists()]
    if settings.accounting:
        missing += accounting.missing_programs(settings)
    try:
        pwd.getpwnam(USER)
    except KeyError:
        missing.append(Path(f"user {USER}"))
    if missing:
        setup = "make setup" if settings.release == "22.05" else f".ci/setup --release {settings.release}"
        raise TestbedError(f"missing: {', '.join(map(str, missing))}; run `{setup}` first")


def write(settings: Settings) -> None:
    """Fill the cluster's state directory."""
    state = settings.state
    for directory in (STATE, state, state / "log", state / "controller", state / "spool"):
        directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        directory.chmod(0o755)
    for node in settings.node_names:
        (state / "spool" / node).mkdir(mode=0o755)
    files = {
        "slurm.conf": config.slurm_conf(settings),
        "gres.conf": config.gres_conf(settings),
        **({"topology.conf": config.topology_conf(settings)} if settings.topology else {}),
        "cgroup.conf": config.cgroup_conf(),
        "hosts": config.hosts(settings),
    }
    for name, text in files.items():
        (state / name).write_text(text)
        (state / name).chmod(0o644)
    shutil.copyfile(_BOOT_SCRIPT, state / "boot.sh")
    key = state / "munge.key"
    key.touch(mode=0o400)
    key.write_bytes(secrets.token_bytes(128))
    for number in range(config.GPUS_PER_NODE):
        # Slurm looks at the device's type alone; this one is /dev/null's.
        os.mknod(state / f"gpu{number}", stat.S_IFCHR | 0o666, os.makedev(1, 3))


def complaints(settings: Settings) -> str:
    """The errors in the cluster's logs, for the message of a start that failed."""
    found = []
    for log in sorted((settings.state / "log").glob("*.log")):
        shown = [line for line in log.read_text(errors="replace").splitlines() if "fatal:" in line]
        found += [f"{log.name}: {line}" for line in shown[-3:]]
    return "\n".join(found)
