"""Places that are names of several addresses, as nearly every name of a node is."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import replace

import pytest

from slurm_elastic.rendezvous.membership.agents import Reason
from slurm_elastic.rendezvous.membership.events import Interrupted
from slurm_elastic.rendezvous.records.api import RunDirRecords
from slurm_elastic.rendezvous.transport.connection import reach
from tests.local.agents import HANG
from tests.local.rendezvous.helpers.parties import Run, form, options
from tests.local.rendezvous.test_failover import places_after

NAME = "node1.test"


@pytest.fixture(autouse=True)
def _name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that /etc/hosts has in one line: getaddrinfo(3) gives its address and the mapped one."""
    look_up = socket.getaddrinfo

    def answer(host: object, port: object, *arguments: object, **options: object) -> list[object]:
        if host != NAME:
            return list(look_up(host, port, *arguments, **options))  # type: ignore[call-overload]
        found: list[object] = [*look_up("127.0.0.1", port, type=socket.SOCK_STREAM)]  # type: ignore[call-overload]
        return [*found, *look_up("::ffff:127.0.0.1", port, type=socket.SOCK_STREAM)]  # type: ignore[call-overload]

    monkeypatch.setattr(socket, "getaddrinfo", answer)


def test_a_name_whose_addresses_all_refuse_is_a_process_that_has_ended() -> None:
    # Nobody else can listen on a port that is bound, and nobody listens on it.
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        with pytest.raises(ConnectionRefusedError):
            asyncio.run(reach((NAME, bound.getsockname()[1])))


def test_a_place_is_known_by_its_address_once_it_was_reached() -> None:
    async def reached(port: int) -> tuple[str, int]:
        stream, endpoint = await reach((NAME, port))
        stream.close()
        return endpoint

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert asyncio.run(reached(port)) == ("127.0.0.1", port)


def test_a_leader_that_was_found_by_name_is_followed_at_once(
    start_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Whoever comes before the leader has said where it is looks for it under the name of its node. Its silence would
    # tell nobody in the time of this test that it is lost.
    times = options(leader_limit=2 * HANG)
    run = start_run(leader_host=NAME, expected_nodes=("node1", "node2", "node3"), options=times)
    leader = run.party(0, leader_host="127.0.0.1")
    with monkeypatch.context() as context:
        known = RunDirRecords.situation
        context.setattr(RunDirRecords, "situation", lambda *given: replace(known(*given), endpoint=None))
        others = [run.party(1), run.party(2)]
        form([leader, *others])
    leader.die()
    for party in others:
        assert party.hear(Interrupted).reason is Reason.NODE_LOST
        party.join()
    places_after(others)
