"""The ports of the workers' stores."""

from __future__ import annotations

from slurm_elastic.rendezvous.worker_store import FreshPorts


def test_a_port_is_not_reserved_again_soon() -> None:
    ports, given = FreshPorts(), []
    for _ in range(2000):
        reserved = ports.reserve()
        reserved.close()
        given.append(reserved.port)
    assert all(port not in given[max(0, index - 255) : index] for index, port in enumerate(given))
