"""The address and the ports by which the other agents of the run reach this node.

Host names mislead: many sites resolve a node's own name to 127.0.1.1, and the name in the management network differs
from that in the fast network. So the user's options come first, then Slurm's NodeAddr, then the kernel's routes.
"""

from __future__ import annotations

import fcntl
import hashlib
import ipaddress
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from slurm_elastic.errors import UsageError
from slurm_elastic.slurm.controller import Controller

_SIOCGIFADDR = 0x8915
"""netdevice(7): the IPv4 address of an interface."""
_TEST_NET = "192.0.2.1"
"""An address that no host has (RFC 5737), so the route to it is the default route."""


@dataclass(frozen=True, slots=True)
class AddressPreference:
    """The user's options for the address; the first one that is given counts."""

    local_addr: str | None = None
    """``--local-addr``: used as it is."""
    interface: str | None = None
    """``--interface``: a network interface of this node, such as ib0."""
    host_pattern: str | None = None
    """``--node-pattern``: name of a node in the data network, such as ``{node}-ib``."""


@dataclass(frozen=True, slots=True)
class AddressFacts:
    """The facts from which `choose_address` chooses."""

    node: str
    """Slurm's name of this node."""
    node_addr: str | None = None
    """Slurm's NodeAddr; None if unknown."""
    interfaces: Mapping[str, str | None] = field(default_factory=dict)
    """IPv4 addresses of the interfaces; None for an interface without one."""
    resolved: Mapping[str, str] = field(default_factory=dict)
    """Addresses of the names that were looked up, without names that do not resolve."""
    route: str | None = None
    """Own address on the route to the leader's node, else on the default route."""
    own_name: str = ""
    """The host's own name, by which gloo finds its address; empty if it does not matter."""
    own_addresses: tuple[str, ...] = ()
    """Those of the resolved addresses that this node has."""


def choose_address(preference: AddressPreference, facts: AddressFacts) -> str:
    """Return the address, or a name that every node resolves.

    Raises:
        UsageError: The interface does not exist or has no address, the name does not resolve, or no address is left.
    """
    if preference.local_addr:
        return preference.local_addr
    if preference.interface:
        return _of_interface(preference.interface, facts)
    if preference.host_pattern:
        return _of_pattern(preference.host_pattern, facts)
    if facts.node_addr and facts.node_addr != facts.node and _reaches_out(facts.node_addr, facts):
        return facts.node_addr
    if _reaches_out(facts.node, facts):
        return facts.node
    if facts.route and not _is_loopback(facts.route):
        return facts.route
    outward = {name: address for name, address in facts.interfaces.items() if address and not _is_loopback(address)}
    if not outward:
        # Without a network all agents are on this machine.
        return "127.0.0.1"
    raise UsageError(
        f"no address by which other nodes reach {facts.node}: its name resolves to this machine alone and there is "
        f"no route; give --interface ({_listed(outward)}) or --local-addr"
    )


def data_interface(preference: AddressPreference, facts: AddressFacts) -> str:
    """Return the interface of the data network; empty if the user has named neither it nor a host there."""
    if preference.local_addr or not (preference.interface or preference.host_pattern):
        return ""
    if preference.interface:
        return preference.interface
    address = facts.resolved.get((preference.host_pattern or "").replace("{node}", facts.node))
    return next((name for name, own in facts.interfaces.items() if own is not None and own == address), "")


def gloo_interface(preference: AddressPreference, facts: AddressFacts) -> str:
    """Return the interface of this node's address if the host's own name leads gloo to no address of this node.

    Empty where gloo finds one: by a name that does not resolve, or resolves to 127.0.1.1, it takes a loopback address,
    which no other node reaches (torch 2.13, ProcessGroupGloo.cpp, createDefaultDevice).
    """
    resolved = facts.resolved.get(facts.own_name)
    usable = resolved is not None and not _is_loopback(resolved) and resolved in facts.own_addresses
    if usable or not facts.own_name:
        return ""
    chosen = choose_address(preference, facts)
    address = facts.resolved.get(chosen, chosen)
    outward = {own: name for name, own in facts.interfaces.items() if own and not _is_loopback(own)}
    return outward.get(address, "")


def data_network(interface: str, for_gloo: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that name the interface for collectives; without them gloo takes that of the host's name.

    Variables that the environment has already are left out. NCCL never asks for the host's name.
    """
    named = {"GLOO_SOCKET_IFNAME": for_gloo} if for_gloo else {}
    if interface:
        # NCCL takes a plain name for a prefix: eth1 would match eth10, too.
        named["NCCL_SOCKET_IFNAME"] = f"={interface}"
    return {name: value for name, value in named.items() if name not in environ}


def gather_facts(
    preference: AddressPreference, node: str, *, toward: str | None = None, controller: Controller | None = None
) -> AddressFacts:
    """Look up the facts that `choose_address` needs for this preference. The name service may block for seconds.

    Args:
        toward: Name or address of the leader's node, or of any other node; None if none is known.
        controller: Gives NodeAddr; None outside Slurm.
    """
    if preference.local_addr:
        return AddressFacts(node)
    interfaces = _interfaces()
    if preference.interface:
        return AddressFacts(node, interfaces=interfaces)
    if preference.host_pattern:
        name = preference.host_pattern.replace("{node}", node)
        return AddressFacts(node, interfaces=interfaces, resolved=_resolve_all(name))
    node_addr = controller.node_address(node) if controller else None
    own_name = socket.gethostname()
    resolved = _resolve_all(node, node_addr, own_name)
    return AddressFacts(
        node,
        node_addr=node_addr,
        interfaces=interfaces,
        resolved=resolved,
        route=_route(toward),
        own_name=own_name,
        own_addresses=tuple(filter(_is_own, resolved.values())),
    )


def resolve(name: str) -> str | None:
    """Return an address of a name, preferably not a loopback address; None if the name does not resolve."""
    try:
        answers = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return None
    return min((str(answer[4][0]) for answer in answers), key=_is_loopback, default=None)


def _is_own(address: str) -> bool:
    """Return True if this node has the address, which may be one of several of an interface (bind(2))."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def _of_interface(name: str, facts: AddressFacts) -> str:
    address = facts.interfaces.get(name)
    if address is None:
        raise UsageError(
            f"no interface {name} with an IPv4 address on {facts.node}; its interfaces are {_listed(facts.interfaces)}"
        )
    return address


def _of_pattern(pattern: str, facts: AddressFacts) -> str:
    if "{node}" not in pattern:
        raise UsageError(f"host name pattern {pattern!r} lacks {{node}}; write it as in '{{node}}-ib'")
    name = pattern.replace("{node}", facts.node)
    if not _reaches_out(name, facts):
        address = facts.resolved.get(name)
        found = f"resolves to the loopback address {address}" if address else "does not resolve"
        raise UsageError(
            f"host name {name} (from {pattern!r}) {found} on {facts.node}; fix the pattern, or give --interface "
            f"({_listed(facts.interfaces)})"
        )
    return name


def _reaches_out(name: str, facts: AddressFacts) -> bool:
    address = facts.resolved.get(name)
    return address is not None and not _is_loopback(address)


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def _listed(interfaces: Mapping[str, str | None]) -> str:
    return ", ".join(f"{name} {address or 'without IPv4 address'}" for name, address in interfaces.items()) or "none"


def _resolve_all(*names: str | None) -> dict[str, str]:
    addresses = {name: resolve(name) for name in dict.fromkeys(names) if name}
    return {name: address for name, address in addresses.items() if address}


def _interfaces() -> dict[str, str | None]:
    # The workers' store listens on IPv4 alone, see `rendezvous.worker_store.ReservedPort`.
    return {name: _ipv4_address(name) for _, name in socket.if_nameindex()}


def _ipv4_address(interface: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def _route(toward: str | None) -> str | None:
    """Return the own address on the route; connecting a datagram socket selects it and sends nothing (udp(7))."""
    for target in (toward, _TEST_NET):
        address = resolve(target) if target else None
        if address is None or _is_loopback(address):
            continue
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((address, 9))
            except OSError:
                continue
            return str(probe.getsockname()[0])
    return None


# The ports of a leader's endpoint.
#
# Every agent derives the same short list, so that all of them try the same next port if one is in use.
CANDIDATES = 16
"""Number of derived ports in the list."""

_FLOOR = 10000
"""Most registered services have lower ports, among them Slurm's own 6817 to 6819."""
_LEAST_CHOICE = 4096
"""Minimum number of ports below the ephemeral range, so that jobs rarely choose the same port."""
_DEFAULT_EPHEMERAL_LOW = 32768
"""Linux's default, ip(7)."""


def ephemeral_low(source: Path = Path("/proc/sys/net/ipv4/ip_local_port_range")) -> int:
    """Return the lowest port that the kernel gives to outgoing connections, ip(7).

    Returns:
        The kernel's default where the file cannot be read.
    """
    try:
        return int(source.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return _DEFAULT_EPHEMERAL_LOW


def port_sequence(run_id: str, restart_count: int, ephemeral_low: int, reserved: Sequence[int] = ()) -> tuple[int, ...]:
    """Return the ports to try, in order: those that Slurm reserved, then `CANDIDATES` derived ones.

    The derived ports are below the ephemeral range, so that no outgoing connection uses them. A hash scatters them, so
    that jobs with consecutive ids on one node rarely choose the same. If the ephemeral range of a site begins too low,
    they are in 10000 to 32767 all the same; agents skip ports in use.

    Args:
        restart_count: Restart count of the job, so that a requeued job does not find the leader of its earlier start.
        ephemeral_low: Lowest port of the ephemeral range, see `ephemeral_low`.
        reserved: SLURM_STEP_RESV_PORTS, the same for all agents of the step.
    """
    low, high = min(_FLOOR, ephemeral_low - _LEAST_CHOICE), ephemeral_low
    if low < 1024:
        low, high = _FLOOR, _DEFAULT_EPHEMERAL_LOW
    derived: dict[int, None] = {}
    turn = 0
    while len(derived) < CANDIDATES:
        text = f"{run_id}\0{restart_count}\0{turn}".encode()
        digest = hashlib.blake2b(text, digest_size=8).digest()
        derived[low + int.from_bytes(digest, "big") % (high - low)] = None
        turn += 1
    return tuple(dict.fromkeys((*reserved, *derived)))
