"""The test cluster by hand."""

from __future__ import annotations

import argparse
import os
import pwd
import sys
import time
from collections.abc import Callable

from . import machine, network, processes
from .cluster import Cluster
from .errors import TestbedError
from .lock import Lock
from .sessions import remove_orphans
from .settings import CONTROLLER, PROCTRACKS, ROOTS, STATE, SWITCH, USER, Settings

_EXAMPLES = """\
examples:
  python3 -m tests.cluster.testbed up                      four nodes, proctrack/cgroup, Slurm 22.05
  python3 -m tests.cluster.testbed shell                   a shell as the ordinary user; sinfo, sbatch, srun work
  python3 -m tests.cluster.testbed kill n2                 power loss of n2; `start n2` brings it back
  python3 -m tests.cluster.testbed up --name other --proctrack linuxproc
"""


def main(argv: list[str] | None = None) -> int:
    """Run the tool; returns its exit code."""
    options = _parser().parse_args(argv)
    try:
        if os.geteuid() != 0:
            raise TestbedError("the test cluster needs root: its nodes are namespaces")
        run: Callable[[argparse.Namespace], int] = options.run
        return run(options)
    except TestbedError as error:
        print(f"testbed: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python3 -m tests.cluster.testbed",
        description="A real Slurm cluster on this machine: every node has its own name, address and processes.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    named = argparse.ArgumentParser(add_help=False)
    named.add_argument("--name", default="default", help="which cluster; several may be up (default: default)")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    up = commands.add_parser("up", parents=[named], help="bring the cluster up, or use it if it is up")
    up.add_argument("--nodes", type=int, default=4, help="number of nodes (default: 4)")
    up.add_argument("--proctrack", choices=PROCTRACKS, default="cgroup")
    up.add_argument("--accounting", action="store_true", help="with slurmdbd and MariaDB, so that sacct works")
    up.add_argument("--release", choices=ROOTS, default="22.05", help="Slurm release (default: 22.05)")
    up.set_defaults(run=_up)

    down = commands.add_parser("down", parents=[named], help="end the cluster, leave nothing")
    down.set_defaults(run=_down)
    clear = commands.add_parser("clear", help="end the clusters of test sessions that were killed")
    clear.set_defaults(run=_clear)
    status = commands.add_parser("status", parents=[named], help="machines, nodes and jobs")
    status.set_defaults(run=_status)
    shell = commands.add_parser("shell", parents=[named], help=f"a shell on the controller as user {USER}")
    shell.add_argument("command", nargs=argparse.REMAINDER, help="run this instead of a shell")
    shell.add_argument("--machine", default=CONTROLLER, help="on another machine (default: ctl)")
    shell.add_argument("--user", default=USER)
    shell.add_argument("--cwd", help="start here (default: the user's home)")
    shell.set_defaults(run=_shell)
    for command, text in (
        ("kill", "power loss of a machine: its processes die, connections are reset"),
        ("start", "bring a killed machine back"),
        ("cut", "pull a machine's network cable: silence"),
        ("heal", "plug it in again"),
    ):
        act = commands.add_parser(command, parents=[named], help=text)
        act.add_argument("machine")
        act.set_defaults(run=_act, command=command)
    return parser


def _clear(options: argparse.Namespace) -> int:
    remove_orphans()
    return 0


def _up(options: argparse.Namespace) -> int:
    settings = Settings(options.name, options.nodes, options.proctrack, options.accounting, options.release)
    begin = time.monotonic()
    with Lock(settings.name).held():
        Cluster.up(settings)
    print(f"cluster {settings.name} is up after {time.monotonic() - begin:.1f} s; logs in {settings.state}/log")
    return 0


def _down(options: argparse.Namespace) -> int:
    # Also a cluster that was never finished, so no settings are read.
    settings = Settings(options.name)
    with Lock(settings.name).held():
        Cluster(settings).down()
    return 0


def _status(options: argparse.Namespace) -> int:
    if not (STATE / Settings(options.name).name).exists():
        print(f"no cluster {options.name!r} is up")
        return 1
    cluster = Cluster.attach(options.name)
    settings = cluster.settings
    if not network.exists(settings.namespace(SWITCH)):
        raise TestbedError(
            f"cluster {settings.name} is gone, its files are left: `up` starts it again, `down` removes them"
        )
    print(settings)
    for name in settings.machines:
        running = processes.init_of(settings.namespace(name)) is not None
        cut = network.cable_is_cut(settings, name)
        print(f"{name:5} {settings.address(name):12} {'running' if running else 'killed'}{', cut' if cut else ''}")
    for argv in (["sinfo"], ["squeue", "--all"]):
        print(cluster.command(argv, user="root").stdout, end="")
    return 0


def _shell(options: argparse.Namespace) -> int:
    settings = Cluster.attach(options.name).settings
    home = pwd.getpwnam(options.user).pw_dir
    command = options.command or ["/bin/bash", "--norc", "-i"]
    env = {"PS1": f"{options.user}@{options.machine}:\\w\\$ ", "TERM": os.environ.get("TERM", "dumb")}
    argv = machine.entry(
        settings, options.machine, command, user=options.user, home=home, cwd=options.cwd or home, env=env
    )
    os.execvp(argv[0], argv)


def _act(options: argparse.Namespace) -> int:
    cluster = Cluster.attach(options.name)
    if options.machine not in cluster.settings.machines:
        raise TestbedError(f"no machine {options.machine!r}: use one of {', '.join(cluster.settings.machines)}")
    getattr(cluster, options.command)(options.machine)
    return 0


if __name__ == "__main__":
    sys.exit(main())
