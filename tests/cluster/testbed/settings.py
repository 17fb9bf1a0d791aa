"""What distinguishes one test cluster from another, and every name that follows from it."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from .errors import TestbedError

STATE = Path("/var/tmp/slurm-elastic-testbed")
"""Parent of every cluster's state directory. Its path is short because sockets live below it."""

USER = "elastic"
"""The ordinary user that jobs run as; `.ci/setup` creates it."""
NEIGHBOUR = "64999"
"""Another ordinary user, who has nothing but this id: no account, no group, no home."""

CONTROLLER = "ctl"
DATABASE = "sql"
ACCOUNTING = "dbd"
SWITCH = "switch"

PROCTRACKS = ("cgroup", "linuxproc")
ROOTS = {
    "22.05": Path("/"),
    "24.11": Path("/opt/slurm-elastic/trixie"),
    "26.05": Path("/opt/slurm-elastic/forky"),
}
"""The Debian root that holds each Slurm release: Debian 12 is the machine itself."""


@dataclass(frozen=True, slots=True)
class Settings:
    """One cluster; two clusters with different names never touch each other."""

    name: str = "default"
    nodes: int = 4
    proctrack: str = "cgroup"
    accounting: bool = False
    release: str = "22.05"
    topology: str = ""
    """tree, or block (23.11 and later): nodes with odd and with even numbers are apart; empty for none."""
    kill_wait: int = 5
    """Seconds between SIGTERM and SIGKILL at the end of a job; Slurm's default is 30."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z0-9][a-z0-9-]{0,23}", self.name):
            raise TestbedError(f"bad cluster name {self.name!r}: use up to 24 of a-z, 0-9 and -")
        if not 1 <= self.nodes <= 64:
            raise TestbedError(f"{self.nodes} nodes: use 1 to 64")
        if self.proctrack not in PROCTRACKS:
            raise TestbedError(f"unknown proctrack {self.proctrack!r}: use one of {', '.join(PROCTRACKS)}")
        if self.release not in ROOTS:
            raise TestbedError(f"unknown Slurm release {self.release!r}: use one of {', '.join(ROOTS)}")

    @property
    def node_names(self) -> tuple[str, ...]:
        """n1, n2 and so on."""
        return tuple(f"n{number}" for number in range(1, self.nodes + 1))

    @property
    def machines(self) -> tuple[str, ...]:
        """Every machine in the order in which they start; the nodes last."""
        return (*((DATABASE, ACCOUNTING) if self.accounting else ()), CONTROLLER, *self.node_names)

    @property
    def root(self) -> Path:
        """Where this release's Debian lies."""
        return ROOTS[self.release]

    @property
    def state(self) -> Path:
        """The cluster's own directory: configuration, logs, spool, database."""
        return STATE / self.name

    @property
    def slurm_conf(self) -> Path:
        """The one slurm.conf of all machines."""
        return self.state / "slurm.conf"

    def address(self, machine: str) -> str:
        """The machine's address in the cluster's own network."""
        servers = {CONTROLLER: 1, ACCOUNTING: 2, DATABASE: 3}
        return f"10.77.0.{servers.get(machine) or 100 + int(machine.removeprefix('n'))}"

    def hardware_address(self, machine: str) -> str:
        """The locally administered MAC address that goes with `address`."""
        return "02:00:" + ":".join(f"{int(part):02x}" for part in self.address(machine).split("."))

    def namespace(self, machine: str) -> str:
        """The machine's network namespace, as `ip netns` names it."""
        return f"slurm-elastic.{self.name}.{machine}"

    def save(self) -> None:
        """Remember these settings for the commands that name the cluster only."""
        (self.state / "settings.json").write_text(json.dumps(asdict(self)) + "\n")

    @staticmethod
    def load(name: str) -> Settings | None:
        """The settings of a cluster that is up or was; None where there is none or it never got so far."""
        try:
            return Settings(**json.loads((STATE / name / "settings.json").read_text()))
        except (OSError, ValueError, TypeError):
            return None
