"""Where the workers' stores listen."""

from __future__ import annotations

import socket
import struct
from pathlib import Path

import pytest

from slurm_elastic.rendezvous.membership.agents import Reason
from slurm_elastic.rendezvous.membership.assignment import Place
from slurm_elastic.rendezvous.transport.messages import Assignment
from slurm_elastic.rendezvous.worker_store import FreshPorts, ReservedPort, open_worker_store


def test_a_port_is_not_reserved_again_soon() -> None:
    ports, given = FreshPorts(), []
    for _ in range(2000):
        reserved = ports.reserve()
        reserved.close()
        given.append(reserved.port)
    assert all(port not in given[max(0, index - 255) : index] for index, port in enumerate(given))


@pytest.mark.parametrize(
    ("known_as", "nodes", "listens"),
    [
        # This machine's, whatever others it has; not the one to which a store withdraws.
        ("127.0.0.7", 2, "127.0.0.7"),
        ("127.0.0.7", 1, "127.0.0.1"),
        ("", 2, "0.0.0.0"),
        ("", 1, "127.0.0.1"),
        # No machine's (RFC 5737), as that of a gateway is not this one's.
        ("198.51.100.7", 2, "0.0.0.0"),
        ("198.51.100.7", 1, "127.0.0.1"),
    ],
)
def test_a_store_listens_where_the_workers_of_its_round_are(known_as: str, nodes: int, listens: str) -> None:
    reserved = ReservedPort(known_as)
    place = Place("n1/1.0/1", "n1", 0, 1, 0, "default", 0, nodes)
    placed = Assignment(1, place, 0, Reason.START, nodes, nodes, known_as, reserved.port, 0)
    served = open_worker_store(placed, reserved)
    assert served is not None
    try:
        assert listening(reserved.port) == [listens]
    finally:
        served.close()


def listening(port: int) -> list[str]:
    """The addresses on which something listens on a port, by proc(5)."""
    lines = (line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:])
    return [
        socket.inet_ntoa(struct.pack("=I", int(local[:8], 16)))
        for _, local, _, state, *_ in lines
        if (int(local[9:], 16), state) == (port, "0A")
    ]
