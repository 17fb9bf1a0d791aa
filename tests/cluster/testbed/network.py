"""The cluster's network: one namespace that is the switch, one per machine, a cable between them."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

from .errors import TestbedError
from .settings import SWITCH, Settings

NAMESPACES = Path("/run/netns")
_ETH0 = "dev", "eth0"
_SYN = "match", "u8", "0x02", "0x12", "at", "33"


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


def close_ports(settings: Settings, machine: str, toward: str, ports: range) -> None:
    """Drop what opens a TCP connection from one machine to these ports of another one, as a firewall does."""
    _shape(settings, machine, limit=0)
    for port, mask in _blocks(ports):
        # Of an IPv4 header without options: byte 22 is the port, in byte 33 SYN is set and ACK is not.
        to_port = ("match", "u16", f"{port:#x}", f"{mask:#x}", "at", "22")
        _filter(settings, machine, toward, 1, "match", "ip", "protocol", "6", "0xff", *to_port, *_SYN)


def slow_down(settings: Settings, machine: str, toward: str) -> None:
    """Let one machine send another one 5 MB/s, and of packets below 256 bytes, such as short messages, 1 kB/s."""
    _shape(settings, machine, limit=2)
    _tc(settings, machine, "class", "add", *_ETH0, "parent", "1:", "classid", "1:2", "htb", "rate", "40mbit")
    _filter(settings, machine, toward, 1, "match", "u16", "0", "0xff00", "at", "2")
    _filter(settings, machine, toward, 2)


def set_free(settings: Settings, machine: str) -> None:
    """Undo `close_ports` and `slow_down`."""
    _tc(settings, machine, "qdisc", "delete", *_ETH0, "root")


def _shape(settings: Settings, machine: str, limit: int) -> None:
    """Let `limit` packets of the first class wait in a queue that sends 1 kB/s, and the first packet at once."""
    _tc(settings, machine, "qdisc", "add", *_ETH0, "root", "handle", "1:", "htb", "default", "0")
    rate = ("htb", "rate", "8kbit", "burst", "1b", "cburst", "1b")
    _tc(settings, machine, "class", "add", *_ETH0, "parent", "1:", "classid", "1:1", *rate)
    _tc(settings, machine, "qdisc", "add", *_ETH0, "parent", "1:1", "pfifo", "limit", str(limit))


def _filter(settings: Settings, machine: str, toward: str, class_: int, *match: str) -> None:
    to = ("match", "ip", "dst", settings.address(toward))
    order = ("prio", f"{class_}", "protocol", "ip", "u32")
    _tc(settings, machine, "filter", "add", *_ETH0, "parent", "1:", *order, *to, *match, "flowid", f"1:{class_}")


def _blocks(ports: range) -> Iterator[tuple[int, int]]:
    """Cut a range of ports into blocks, each the first port and the bits that the ports of the block share."""
    port = ports.start
    while port < ports.stop:
        size = port & -port or 1 << 16
        while port + size > ports.stop:
            size //= 2
        yield port, (1 << 16) - size
        port += size


def _tc(settings: Settings, machine: str, *arguments: str) -> None:
    _run("tc", "-n", settings.namespace(machine), *arguments)


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
    return _run("ip", *arguments)


def _run(*argv: str) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise TestbedError(f"{' '.join(argv)}: {done.stderr.strip() or done.returncode}")
    return done.stdout
