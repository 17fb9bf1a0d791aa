"""A place where only the programs under test matter: no network but the loopback, and enough file descriptors."""

from __future__ import annotations

import os
import resource
import subprocess
import sys

_INSIDE = "SLURM_ELASTIC_BENCHMARK_ALONE"


def enter(module: str) -> None:
    """Run this module again in a network namespace of its own, if root runs it; else say so and go on.

    torch's TCPStore asks for the name of every peer. Without a route the question fails at once; with the machine's own
    network it would measure the machine's name server.

    Args:
        module: to run again, with the same arguments.
    """
    if _INSIDE in os.environ:
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        return
    if os.geteuid() != 0:
        print("not root: measured in the machine's own network, whose name server TCPStore depends on", flush=True)
        return
    os.environ[_INSIDE] = "1"
    os.execvp("unshare", ["unshare", "--net", sys.executable, "-m", module, *sys.argv[1:]])


def raise_descriptor_limit() -> None:
    """As many file descriptors as the system lets this process have."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
