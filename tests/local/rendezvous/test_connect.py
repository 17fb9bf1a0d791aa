"""Where a leader listens, and who leads."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from slurm_elastic.rendezvous.leader.leader import Leader
from slurm_elastic.rendezvous.membership.agents import Reason
from slurm_elastic.rendezvous.membership.config import OnTie
from slurm_elastic.slurm import port_sequence
from tests.local.rendezvous.helpers.parties import Run, endpoint, form, options

StartRun = Callable[..., Run]


@pytest.fixture
def taken() -> Iterator[Callable[[int], int]]:
    """Listen on a free port, or a given one, on behalf of somebody else."""
    with ExitStack() as stack:
        yield lambda port=0: stack.enter_context(socket.create_server(("", port))).getsockname()[1]


def test_a_port_in_use_leads_to_the_next(start_run: StartRun, taken: Callable[..., int]) -> None:
    first, second = taken(), taken()
    # Several, as anybody on this machine may take one of them just now.
    others = port_sequence(f"next {os.getpid()}", 0, 32768)
    run = start_run(ports=(first, second, *others), expected_nodes=("node1", "node2"))
    party = run.party(0)
    found = endpoint(run)
    assert found.pop("port") in others
    assert found == {"address": "127.0.0.1", "epoch": 1, "agent": party.config.agent}
    form([party, run.party(1)])


def test_whoever_takes_all_ports_of_a_run_keeps_its_leader_out_of_none(
    start_run: StartRun, taken: Callable[..., int]
) -> None:
    ports = (taken(), taken())
    run = start_run(ports=ports, expected_nodes=("node1", "node2"))
    party = run.party(0)
    assert endpoint(run)["port"] not in ports
    # The others expect it on a port that somebody else has, and read where it is.
    form([party, run.party(1)])


def test_a_leader_whose_chosen_port_is_in_use_listens_on_another(
    start_run: StartRun, taken: Callable[..., int], caplog: pytest.LogCaptureFixture
) -> None:
    port = taken()
    run = start_run(ports=(port,), expected_nodes=("node1", "node2"))
    party = run.party(0)
    assert f"port {port} is in use on node1; this agent leads on another one" in caplog.messages
    assert endpoint(run)["port"] != port
    form([party, run.party(1)])


def test_a_run_of_one_node_listens_to_itself_only(start_run: StartRun) -> None:
    run = start_run(expected_nodes=("node1",))
    run.party(0)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", endpoint(run)["port"]), timeout=5)


def test_the_leader_has_the_settings_of_its_agent(start_run: StartRun, leaders: list[Leader]) -> None:
    times = options(on_tie=OnTie.NONE)
    run = start_run(expected_nodes=("node1", "node2"), min_nodes=2, max_nodes=2, max_restarts=5, options=times)
    run.run_dir.claim_record({}, "rounds", 3)
    run.party(0, restart_count=0)
    settings = leaders[0].membership.settings
    assert (settings.min_nodes, settings.max_nodes, settings.max_restarts) == (2, 2, 5)
    assert settings.expected_nodes == ("node1", "node2")
    assert settings.on_tie is OnTie.NONE
    assert (settings.first_round, settings.first_reason) == (4, Reason.START)
    assert (leaders[0].epoch, leaders[0].run) == (1, "run.0")


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"{}", b'{"address": "x"}', b'{"address": "x", "port": "y"}', b'{"address": "x", "port": null}'],
)
def test_an_endpoint_that_is_no_endpoint_is_not_believed(start_run: StartRun, content: bytes) -> None:
    run = start_run(expected_nodes=("node1", "node2"))
    leader = run.party(0)
    if content.startswith(b"{") and content.endswith(b"}"):
        run.run_dir.publish_record(json.loads(content), "endpoints", "run.0")
    else:
        (run.run_dir.path / "endpoints/run.0.json").write_bytes(content)
    assert {place.nodes for place in form([leader, run.party(1)])} == {2}
