"""Remove a cluster: one that is up, one that a killed command left half made, or none at all."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from . import network, processes
from .errors import TestbedError
from .settings import Settings

# In a mount namespace of its own, because the host may not have cgroup v1's freezer mounted anywhere.
# A group stays busy for a moment after its last process was killed.
_REMOVE_GROUPS = """
mount -t cgroup -o freezer cgroup "$1" 2>/dev/null || exit 0
tries=0
while [ -d "$1/slurm-elastic/$2" ]; do
    complaint=$(find "$1/slurm-elastic/$2" -depth -type d -exec rmdir {} + 2>&1) && break
    tries=$((tries + 1))
    [ $tries -lt 200 ] || { echo "$complaint" >&2; exit 1; }
    sleep 0.05
done
rmdir "$1/slurm-elastic" 2>/dev/null || :
"""


def remove(settings: Settings) -> None:
    """End every process of the cluster and remove its namespaces, control groups and files."""
    names = network.namespaces(settings)
    processes.end(names)
    for name in names:
        network.delete(name)
    remove_groups(settings)
    shutil.rmtree(settings.state, ignore_errors=True)
    if settings.state.exists():
        # Say what is in the way instead of leaving it.
        shutil.rmtree(settings.state)


def remove_groups(settings: Settings, machine: str = "") -> None:
    """Remove the control groups of one machine, or of the whole cluster; they must be without processes."""
    if settings.proctrack != "cgroup" and machine:
        return
    below = str(Path(settings.name) / machine) if machine else settings.name
    done = subprocess.run(
        ["unshare", "--mount", "--", "/bin/sh", "-c", _REMOVE_GROUPS, "sh", "/mnt", below],
        check=False,
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise TestbedError(f"control groups of cluster {settings.name} do not go: {done.stderr.strip()}")
