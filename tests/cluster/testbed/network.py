"""The cluster's network: one namespace that is the switch, one per machine, a cable between them."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from pathlib import Path

from .errors import TestbedError
from .settings import SWITCH, Settings

NAMESPACES = Path("/run/netns")


def create_switch(settings: Settings) -> None:
    """The bridge, in a namespace of its own so that clusters need no different addresses."""
    switch = settings.namespace(SWITCH)
    _ip("netns", "add", switch)
    _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
    _ip("-n", switch, "link", "set", "bridge", "up")


def attach(settings: Settings, machine: str) -> None:
    """Give the machine a fresh namespace, cable and address; an earlier one is replaced."""
    switch, namespace = settings.namespace(SWITCH), settings.namespace(machine)
    if exists(namespace):
        # The kernel destroys a namespace some time after its name is gone, and the cable's other end with it.
        subprocess.run(["ip", "-n", switch, "link", "delete", machine], capture_output=True, check=False)
        _ip("netns", "delete", namespace)
    _ip("netns", "add", namespace)
    # The same hardware address at every start, as a computer has: peers may have it in their caches.
    _ip(
        *("-n", switch, "link", "add", machine, "type", "veth"),
        *("peer", "name", "eth0", "address", settings.hardware_address(machine), "netns", namespace),
    )
    _ip("-n", switch, "link", "set", machine, "master", "bridge", "up")
    _ip("-n", namespace, "link", "set", "lo", "up")
    _ip("-n", namespace, "address", "add", f"{settings.address(machine)}/24", "dev", "eth0")
    _ip("-n", namespace, "link", "set", "eth0", "up")


def set_cable(settings: Settings, machine: str, state: str) -> None:
    """Pull the cable at the switch (`down`) or plug it in again (`up`): silence, not resets."""
    _ip("-n", settings.namespace(SWITCH), "link", "set", machine, "master", "bridge", state)


def set_apart(settings: Settings, machines: Iterable[str]) -> None:
    """Move these machines' cables to another bridge: they reach each other and nobody else."""
    switch = settings.namespace(SWITCH)
    if "island" not in _ip("-n", switch, "-brief", "link", "show", "type", "bridge"):
        _ip("-n", switch, "link", "add", "island", "type", "bridge")
        _ip("-n", switch, "link", "set", "island", "up")
    for machine in machines:
        _ip("-n", switch, "link", "set", machine, "master", "island")


def cable_is_cut(settings: Settings, machine: str) -> bool:
    """Whether `set_cable` pulled this machine's cable, or `set_apart` moved it."""
    shown = _ip("-n", settings.namespace(SWITCH), "-oneline", "link", "show", machine)
    return "UP" not in shown.split("<", 1)[1].split(">", 1)[0].split(",") or " master bridge " not in shown


def exists(namespace: str) -> bool:
    """Whether `ip netns` knows the namespace."""
    return (NAMESPACES / namespace).exists()


def namespaces(settings: Settings) -> list[str]:
    """Every namespace of the cluster that there is, also those of an earlier, larger one."""
    return sorted(path.name for path in NAMESPACES.glob(f"{settings.namespace('*')}"))


def delete(namespace: str) -> None:
    """Remove the namespace's name; with its last process gone the kernel drops it."""
    _ip("netns", "delete", namespace)


def _ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise TestbedError(f"ip {' '.join(arguments)}: {done.stderr.strip() or done.returncode}")
    return done.stdout
