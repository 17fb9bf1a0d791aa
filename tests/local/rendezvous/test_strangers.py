"""Others on the leader's port: whatever they send is dropped and counted, said once, and the run goes on."""

from __future__ import annotations

import logging
import re
import resource
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from slurm_elastic.rendezvous.leader.leader import Leader
from slurm_elastic.rendezvous.membership.agents import Reason
from slurm_elastic.rendezvous.membership.events import Finished, Publish
from slurm_elastic.rendezvous.run_events import describe
from slurm_elastic.rendezvous.transport.messages import encode
from slurm_elastic.rendezvous.transport.session import Role, Session
from tests.local.agents import HANG, eventually
from tests.local.rendezvous.helpers.parties import Party, Run, form, interrupted, options
from tests.local.waiting import descriptors

StartRun = Callable[..., Run]


def frame(content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + content


def connect_to(party: Party, source: str = "127.0.0.1") -> socket.socket:
    endpoint = party.config.run_dir.read_record("endpoints", party.config.incarnation) or {}
    return socket.create_connection(("127.0.0.1", endpoint["port"]), timeout=HANG, source_address=(source, 0))


def closed(stranger: socket.socket) -> bool:
    """Whether the leader closed it, after having read what was sent or not."""
    try:
        while stranger.recv(4096):
            pass
    except ConnectionResetError:
        pass
    return True


def authenticated(party: Party, name: str) -> tuple[Session, socket.socket]:
    """A connection to the leader that has proved to be this agent's: its session, and itself."""
    agent = Session(Role.AGENT, party.config.run_dir.secret(), party.config.incarnation, agent=name)
    stream = connect_to(party)
    agent.port = stream.getpeername()[1]
    stream.sendall(agent.start())
    while not agent.established:
        _, answer = agent.receive(stream.recv(4096))
        stream.sendall(answer)
    return agent, stream


@pytest.fixture
def _soft_limit() -> Iterator[None]:
    """This process may open 1,024 files, as after most login shells."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, hard), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_run_goes_on_among_strangers(
    start_run: StartRun, leaders: list[Leader], caplog: pytest.LogCaptureFixture
) -> None:
    run = start_run()
    parties = run.formed(2)
    greeting = Session(Role.AGENT, bytes(32), "run.0", agent="node9/7.0/1")
    sent = [
        bytes(range(256)) * 100,
        b"GET / HTTP/1.1\r\nHost: node1\r\n\r\n",
        b"\xff\xff\xff\xff",
        greeting.start() + frame(b'{"agent": "node9/7.0/1", "proof": "\\udfff"}'),
        greeting.start() + frame(encode(Finished(parties[0].config.agent, 0))),
    ]
    with caplog.at_level(logging.WARNING), ExitStack() as stack:
        for data in sent:
            stranger = stack.enter_context(connect_to(parties[0]))
            stranger.sendall(data)
            assert closed(stranger)
        assert all(party.silent() for party in parties)
        # It goes on as before.
        joining = run.party(2)
        joining.join()
        interrupted(parties, Reason.NODE_JOINED)
        assert {place.nodes for place in form(parties)} == {3}
    assert leaders[0].connections.drops.count == len(sent)
    lines = [record.getMessage() for record in caplog.records if "dropped" in record.getMessage()]
    assert len(lines) == 1
    assert lines[0].startswith("dropped a frame of ")
    assert lines[0].endswith(" (logged once)")


_FLOOD = """
import resource, select, socket, sys
port, least = int(sys.argv[1]), int(sys.argv[2])
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
strangers, made = {}, 0
poll = select.epoll()
poll.register(0, select.EPOLLIN)
while True:
    if made < least or len(strangers) < 1000:
        stranger = socket.create_connection(("127.0.0.1", port), source_address=(f"127.0.0.{2 + made % 200}", 0))
        stranger.send(bytes(made % 4))
        strangers[stranger.fileno()] = stranger
        poll.register(stranger, select.EPOLLIN | select.EPOLLRDHUP)
        made += 1
        if made == least:
            print(made, flush=True)
    for descriptor, _ in poll.poll(0 if len(strangers) < 1000 else None):
        if not descriptor:
            sys.exit()
        strangers.pop(descriptor).close()
"""


@pytest.mark.usefixtures("_soft_limit")
def test_a_first_round_forms_among_ten_thousand_strangers(
    start_run: StartRun, leaders: list[Leader], caplog: pytest.LogCaptureFixture
) -> None:
    run = start_run(expected_nodes=tuple(f"node{number}" for number in range(1, 9)))
    leader = run.party(0)
    port = (leader.config.run_dir.read_record("endpoints", "run.0") or {})["port"]
    with (
        caplog.at_level(logging.WARNING),
        subprocess.Popen(
            [sys.executable, "-c", _FLOOD, str(port), "10000"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as flood,
    ):
        eventually(lambda: leaders[0].connections.drops.count > 1000)
        others = [run.party(position) for position in range(1, 8)]
        places = form([leader, *others])
        # They go on to come until they are told to end.
        assert flood.stdout is not None
        assert flood.stdin is not None
        assert flood.stdout.readline() == "10000\n"
        held = len(descriptors())
        flood.stdin.close()
    assert {(place.round, place.nodes) for place in places} == {(0, 8)}
    # Some are left for records and logs.
    assert held < 1024 - 128
    lines = [record.getMessage() for record in caplog.records if "dropped" in record.getMessage()]
    assert 1 <= len(lines) < 20
    why = "(one of too many connections that have said nothing|a handshake that was never completed)"
    dropped = rf"dropped {why} from (::ffff:)?127\.0\.0\.\d+ \(logged once(; \d+ more addresses since the last line)?\)"
    assert all(re.fullmatch(dropped, line) for line in lines)


def test_a_fault_of_a_tick_does_not_stop_the_leaders_clock(
    start_run: StartRun, leaders: list[Leader], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start_run(options=options(heartbeat_limit=0.3)).formed(2)
    ticks = 0

    def fails(*_: object) -> None:
        nonlocal ticks
        ticks += 1
        raise RuntimeError("a fault in here")

    with caplog.at_level(logging.WARNING):
        monkeypatch.setattr(leaders[0].connections, "beat", fails)
        eventually(lambda: ticks > 3)
        monkeypatch.undo()
    assert caplog.text.count("the leader goes on after a fault") == 1


def test_agents_that_authenticate_and_say_nothing_are_not_waited_for_longer_than_told(start_run: StartRun) -> None:
    nodes = tuple(f"node{number}" for number in range(1, 6))
    run = start_run(expected_nodes=nodes, options=options(last_call_timeout=1.0))
    parties = [run.party(0), run.party(1)]
    with ExitStack() as stack:
        for node in nodes[2:]:
            stack.enter_context(authenticated(parties[0], f"{node}/7.0/9")[1])
        assert {(place.round, place.nodes) for place in form(parties)} == {(0, 2)}
    formed = next(decision for decision in parties[0].decisions if isinstance(decision, Publish))
    said = describe(formed)
    assert said is not None
    assert re.fullmatch(r"round 0 formed after start in \d+\.\d\d s: 2 nodes \(node1, node2\), 2 workers", said.text)


def test_a_handshake_that_is_never_completed_is_cut_off(
    start_run: StartRun, leaders: list[Leader], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slurm_elastic.rendezvous.transport.listener._HANDSHAKE_TIMEOUT", 0.1)
    party = start_run().party(0)
    form([party])
    connections = leaders[0].connections.by_agent
    before = connections[party.config.agent]
    with connect_to(party, "127.0.0.3") as stranger:
        stranger.sendall(b"\x00\x00")
        assert closed(stranger)
    assert leaders[0].connections.drops.count == 1
    # Those that have completed it stay, and their time would be over by now, too.
    assert connections[party.config.agent] is before
    assert party.silent()


def test_a_greeting_that_is_sent_again_takes_no_room(start_run: StartRun, leaders: list[Leader]) -> None:
    run = start_run()
    parties = run.formed(2)
    # As an agent has said it on a port where it expected the leader, and another user listened.
    greeting = Session(Role.AGENT, run.run_dir.secret(), "run.0", agent=parties[1].config.agent).start()
    with ExitStack() as stack:
        strangers = [stack.enter_context(connect_to(parties[0])) for _ in range(20)]
        for stranger in strangers:
            stranger.sendall(greeting)
        assert sum(b"proof" in stranger.recv(4096) for stranger in strangers) == 1
        assert leaders[0].connections.drops.count == 19
        eventually(lambda: len(leaders[0].connections.pending) == 1)
    assert all(party.silent() for party in parties)


def test_an_agent_that_speaks_for_another_is_not_heard(start_run: StartRun, leaders: list[Leader]) -> None:
    run = start_run()
    parties = run.formed(2)
    agent, stream = authenticated(parties[0], "node9/7.0/9")
    with stream:
        for party in parties:
            stream.sendall(agent.seal(encode(Finished(party.config.agent, 0))))
        eventually(lambda: leaders[0].connections.drops.count == 2)
    assert all(party.silent() for party in parties)
    assert not run.run_dir.is_done()
