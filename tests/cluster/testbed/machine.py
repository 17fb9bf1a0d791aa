"""Start machines and run things on them."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from . import network, processes
from .errors import TestbedError
from .settings import CONTROLLER, NEIGHBOUR, Settings

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def start(
    settings: Settings,
    machine: str,
    program: Sequence[str],
    *,
    root: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> None:
    """Give the machine a fresh network and boot it with `program` as its main program."""
    network.attach(settings, machine)
    log = settings.state / "log" / f"boot.{machine}.log"
    with log.open("ab") as output:
        # setsid --fork: nothing of the machine is this process's child, or ends with its terminal.
        subprocess.run(
            [
                *("setsid", "--fork"),
                *("nsenter", f"--net={network.NAMESPACES / settings.namespace(machine)}", "--"),
                *("unshare", "--uts", "--ipc", "--pid", "--mount", "--fork", "--"),
                *("/bin/bash", str(settings.state / "boot.sh")),
                *(machine, str(settings.state), str(root or settings.root), settings.proctrack),
                *program,
            ],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd="/",
            env={"PATH": PATH, "LANG": "C.UTF-8", "SLURM_CONF": str(settings.slurm_conf), **(env or {})},
            check=True,
        )


def kill(settings: Settings, machine: str) -> None:
    """End the machine as a power loss does, and wait until its last process is gone."""
    init = processes.init_of(settings.namespace(machine))
    if init is None:
        raise TestbedError(f"{machine} is not running")
    # The kernel kills a process namespace at once with its first process. Killed one after the other, those that are
    # left could still act: srun's second process cancels the step on every node when srun is gone (Slurm 22.05).
    processes.end_first(init)
    processes.end([settings.namespace(machine)])


def entry(
    settings: Settings,
    machine: str,
    argv: Sequence[str],
    *,
    user: str,
    home: str,
    cwd: str | Path = "/",
    env: Mapping[str, str] | None = None,
) -> list[str]:
    """The command line that runs `argv` on the machine as `user`, with an environment of its own.

    Raises:
        TestbedError: the machine is not running.
    """
    init = processes.init_of(settings.namespace(machine))
    if init is None:
        raise TestbedError(f"{machine} of cluster {settings.name} is not running")
    groups = "--clear-groups" if user == NEIGHBOUR else "--init-groups"
    variables = {
        "PATH": PATH,
        "LANG": "C.UTF-8",
        "HOME": home,
        "USER": user,
        "LOGNAME": user,
        "SHELL": "/bin/bash",
        "SLURM_CONF": str(settings.slurm_conf),
        **(env or {}),
    }
    return [
        *("nsenter", f"--target={init.pid}", "--mount", "--uts", "--ipc", "--net", "--pid", "--cgroup"),
        *("--root", "--"),
        *("setpriv", f"--reuid={user}", f"--regid={user}", groups, "--"),
        *("env", "--ignore-environment", f"--chdir={cwd}"),
        *(f"{key}={value}" for key, value in variables.items()),
        *argv,
    ]


def wait_running(settings: Settings, machine: str, timeout: float = 10.0) -> None:
    """Wait until the machine's main program runs behind its init."""
    deadline = time.monotonic() + timeout
    while True:
        init = processes.init_of(settings.namespace(machine))
        if init is not None and init.name == "tini":
            return
        if time.monotonic() > deadline:
            log = settings.state / "log" / f"boot.{machine}.log"
            raise TestbedError(f"{machine} did not start: {log.read_text().strip() or log}")
        time.sleep(0.02)


def main_program(settings: Settings, machine: str) -> list[str]:
    """What a controller or a node runs."""
    if machine == CONTROLLER:
        return ["/usr/sbin/slurmctld", "-D", "-f", str(settings.slurm_conf)]
    return ["/usr/sbin/slurmd", "-D", "-N", machine, "-f", str(settings.slurm_conf)]


def listens(settings: Settings, machine: str, port: int) -> bool:
    """Whether something on the machine listens on this TCP port."""
    init = processes.init_of(settings.namespace(machine))
    if init is None:
        return False
    # proc(5) /proc/net/tcp: the second column is address:port in hex, the fourth the state, 0A for LISTEN.
    rows = [line.split() for line in Path(f"/proc/{init.pid}/net/tcp").read_text().splitlines()[1:]]
    return any(row[3] == "0A" and int(row[1].rsplit(":", 1)[1], 16) == port for row in rows)
