"""A socket filter by which the kernel admits the nodes of a round to the workers' store, and drops all others.

torch's store authenticates no client, so only the address tells members of the round from others. A program of
classic BPF on the listening socket drops the packets of others before there is a connection. This is best effort:
since Linux commit 5d39580f68e6 (2026), and seen with 6.18.44, SO_ATTACH_FILTER wants CAP_NET_ADMIN on TCP sockets;
before, it is allowed to every user.
"""

from __future__ import annotations

import array
import contextlib
import ipaddress
import socket
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

__all__ = [
    "Instruction",
    "Range",
    "address_ranges",
    "attach_filter",
    "close_waiting_strangers",
    "filter_program",
    "foreign_sources",
]

_SO_ATTACH_FILTER = 26
"""socket(7); Python (3.14) has no name for it."""
_LOAD_WORD, _JUMP_GREATER_EQUAL, _JUMP_GREATER, _RETURN = 0x20, 0x35, 0x25, 0x06
"""BPF_LD | BPF_W | BPF_ABS; BPF_JMP | BPF_JGE | BPF_K; BPF_JMP | BPF_JGT | BPF_K; BPF_RET | BPF_K (linux/filter.h)."""
_SOURCE_ADDRESS = 0xFFF00000 + 12
"""SKF_NET_OFF: on a TCP socket a filter sees the segment, and only by this offset the IP header before it."""
_WHOLE_PACKET, _NOTHING = 0xFFFFFFFF, 0
_MAX_INSTRUCTIONS = 4096
"""BPF_MAXINSNS. A kernel whose net.core.optmem_max is 20 KiB, as before Linux 6.8, takes about half as many."""
_LOOPBACK = (0x7F000000, 0x7FFFFFFF)
_LISTENING = "0A"

Range = tuple[int, int]


class Instruction(NamedTuple):
    """One instruction of classic BPF: struct sock_filter."""

    code: int
    if_true: int
    if_false: int
    operand: int


def address_ranges(addresses: Iterable[str]) -> tuple[Range, ...]:
    """Return the IPv4 addresses among these, and the loopback network, as few ranges of numbers, both ends included.

    The store listens on IPv4 alone, so addresses of IPv6 do not matter.

    Raises:
        ValueError: One of them is no address.
    """
    parsed = {ipaddress.ip_address(address) for address in addresses}
    ranges: list[Range] = []
    for number in sorted(int(address) for address in parsed if address.version == 4 and not address.is_loopback):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1] = (ranges[-1][0], number)
        else:
            ranges.append((number, number))
    return (_LOOPBACK, *ranges)


def filter_program(ranges: Sequence[Range]) -> tuple[Instruction, ...] | None:
    """Return the program that passes packets whose source is in one of the ranges; None if there are too many."""
    program = [Instruction(_LOAD_WORD, 0, 0, _SOURCE_ADDRESS)]
    for first, last in ranges:
        program += (
            Instruction(_JUMP_GREATER_EQUAL, 0, 2, first),
            Instruction(_JUMP_GREATER, 1, 0, last),
            Instruction(_RETURN, 0, 0, _WHOLE_PACKET),
        )
    program.append(Instruction(_RETURN, 0, 0, _NOTHING))
    return tuple(program) if len(program) <= _MAX_INSTRUCTIONS else None


def attach_filter(listening: socket.socket, program: Sequence[Instruction]) -> None:
    """Have the kernel pass what comes to a listening socket, and to connections made on it from now on, by a program.

    Raises:
        OSError: The kernel refuses it.
    """
    code = array.array("B", b"".join(struct.pack("HBBI", *instruction) for instruction in program))
    address, _ = code.buffer_info()
    listening.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", len(program), address))


def close_waiting_strangers(listening: socket.socket, ranges: Sequence[Range]) -> None:
    """Close what waits to be accepted, if a connection from outside of the ranges is among it.

    Its port was open before the nodes of the round were known. Members that are closed with it try again, as torch's
    client does (2.13).

    Args:
        listening: Its filter is attached.
        ranges: As of the filter.
    """
    port = listening.getsockname()[1]
    with contextlib.suppress(OSError):
        if foreign_sources(port, ranges, Path("/proc/net/tcp").read_text()):
            listening.setblocking(False)
            while True:
                listening.accept()[0].close()


def foreign_sources(port: int, ranges: Sequence[Range], table: str) -> list[str]:
    """Return the addresses outside of the ranges that have connections to a port.

    Args:
        port: On which a socket of this node listens.
        ranges: Of those that belong there.
        table: What /proc/net/tcp says (proc(5)).
    """
    found = []
    for line in table.splitlines()[1:]:
        _, local, remote, state, *_ = line.split()
        if state == _LISTENING or int(local.partition(":")[2], 16) != port:
            continue
        # Four bytes in the order of the network, printed as one number of this machine.
        source = ipaddress.IPv4Address(struct.pack("=I", int(remote.partition(":")[0], 16)))
        if not any(first <= int(source) <= last for first, last in ranges):
            found.append(str(source))
    return found
