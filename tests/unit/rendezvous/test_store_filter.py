"""The filter on the socket of the workers' store, as the kernel would run it."""

from __future__ import annotations

import ipaddress
import random
import struct

import pytest

from slurm_elastic.rendezvous.store_filter import Instruction, Range, address_ranges, filter_program, foreign_sources

LOOPBACK = (0x7F000000, 0x7FFFFFFF)


def number(address: str) -> int:
    return int(ipaddress.IPv4Address(address))


def passes(program: tuple[Instruction, ...], source: str) -> bool:
    """Run a program of classic BPF on a packet from this address."""
    header = bytearray(20)
    header[12:16] = ipaddress.IPv4Address(source).packed
    accumulator = at = 0
    while True:
        code, if_true, if_false, operand = program[at]
        at += 1
        match code:
            case 0x20:
                offset = operand - 0xFFF00000
                (accumulator,) = struct.unpack(">I", header[offset : offset + 4])
            case 0x35:
                at += if_true if accumulator >= operand else if_false
            case 0x25:
                at += if_true if accumulator > operand else if_false
            case 0x06:
                return operand == 0xFFFFFFFF
            case _:
                pytest.fail(f"code {code:#x}")


@pytest.mark.parametrize(
    ("addresses", "ranges"),
    [
        ([], ()),
        (["10.0.0.2", "10.0.0.1", "10.0.0.2"], (("10.0.0.1", "10.0.0.2"),)),
        (["10.0.0.1", "10.0.0.3"], (("10.0.0.1", "10.0.0.1"), ("10.0.0.3", "10.0.0.3"))),
        (["10.0.0.255", "10.0.1.0"], (("10.0.0.255", "10.0.1.0"),)),
        # The store is reached by IPv4 alone, and from this node in any case.
        (["fd00::1", "127.0.1.1", "10.0.0.1"], (("10.0.0.1", "10.0.0.1"),)),
        (["126.255.255.255", "128.0.0.0"], (("126.255.255.255", "126.255.255.255"), ("128.0.0.0", "128.0.0.0"))),
    ],
)
def test_addresses_beside_each_other_are_one_range(addresses: list[str], ranges: tuple[tuple[str, str], ...]) -> None:
    assert address_ranges(addresses) == (LOOPBACK, *((number(first), number(last)) for first, last in ranges))


def test_words_that_are_no_address() -> None:
    with pytest.raises(ValueError, match="n1"):
        address_ranges(["10.0.0.1", "n1"])


def test_a_program_passes_its_addresses_and_the_loopback_and_no_others() -> None:
    random.seed(1)
    for count in (0, 1, 2, 40, 1000):
        members = {
            str(ipaddress.IPv4Address(random.choice((0x0A000000, 0xC0A80000)) + random.randrange(2000)))
            for _ in range(count)
        }
        program = filter_program(address_ranges(members))
        assert program is not None
        near = {str(ipaddress.IPv4Address(number(member) + step)) for member in members for step in (-1, 0, 1)}
        edges = {"0.0.0.0", "126.255.255.255", "127.0.0.1", "127.255.255.255", "128.0.0.0", "255.255.255.255"}
        for source in near | edges:
            assert passes(program, source) == (source in members or source.startswith("127.")), source


def test_a_program_that_the_kernel_would_not_take() -> None:
    def apart(count: int) -> tuple[Range, ...]:
        return tuple((2 * index, 2 * index) for index in range(count))

    longest = filter_program(apart(1364))
    assert longest is not None
    assert len(longest) <= 4096
    assert all(max(instruction.if_true, instruction.if_false) < 256 for instruction in longest)
    assert filter_program(apart(1365)) is None


def test_connections_to_a_port_from_elsewhere() -> None:
    table = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100000A:C001 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 1 1 0 100 0 0 10 0
   1: 0100000A:C001 0200000A:8001 01 00000000:00000000 00:00000000 00000000  1000        0 0 1 0 20 4 30 10 -1
   2: 0100000A:C001 0300000A:8001 08 00000000:00000000 00:00000000 00000000  1000        0 0 1 0 20 4 30 10 -1
   3: 0100000A:C002 0400000A:8001 01 00000000:00000000 00:00000000 00000000  1000        0 0 1 0 20 4 30 10 -1
"""
    assert foreign_sources(0xC001, address_ranges(["10.0.0.2"]), table) == ["10.0.0.3"]
    assert foreign_sources(0xC001, address_ranges(["10.0.0.2", "10.0.0.3"]), table) == []
