"""Others on the leader's port: whatever they send is dropped and counted, said once, and the run goes on."""

from __future__ import annotations

import json
import logging
import pickle
import socket
import struct
from collections.abc import Callable
from contextlib import ExitStack

import pytest

from slurm_elastic.rendezvous.election.leader_location import LeaderLocation
from slurm_elastic.rendezvous.election.runner import FollowerConfig
from slurm_elastic.rendezvous.leader.leader import Leader
from slurm_elastic.rendezvous.leader_events import Unreachable
from slurm_elastic.rendezvous.membership import Finished, Reason
from slurm_elastic.rendezvous.thread import Coordination
from slurm_elastic.rendezvous.transport import session
from slurm_elastic.rendezvous.transport.messages import encode
from slurm_elastic.rendezvous.transport.session import Role, Session
from tests.local.agents import PATIENCE, eventually
from tests.local.rendezvous.parties import Party, Run, form, interrupted

StartRun = Callable[..., Run]


class _Executed:
    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return pytest.fail, ("it was unpickled",)


def frame(content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + content


def connect_to(party: Party, source: str = "127.0.0.1") -> socket.socket:
    endpoint = json.loads(party.config.run_dir.endpoint(party.config.incarnation) or b"")
    return socket.create_connection(("127.0.0.1", endpoint["port"]), timeout=PATIENCE, source_address=(source, 0))


def closed(stranger: socket.socket) -> bool:
    """Whether the leader closed it, after having read what was sent or not."""
    try:
        while stranger.recv(4096):
            pass
    except ConnectionResetError:
        pass
    return True


def test_the_run_goes_on_among_strangers(
    start_run: StartRun, leaders: list[Leader], caplog: pytest.LogCaptureFixture
) -> None:
    run = start_run()
    parties = run.all_of(2)
    form(parties)
    greeting = Session(Role.AGENT, bytes(32), "run.0", agent="node9/7.0/1")
    sent = [
        bytes(range(256)) * 100,
        pickle.dumps(_Executed()),
        frame(pickle.dumps(_Executed())),
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
    assert sum(leaders[0].rejected.values()) == len(sent)
    lines = [record.getMessage() for record in caplog.records if "dropped" in record.getMessage()]
    assert len(lines) == 1
    assert lines[0].startswith("dropped a frame of ")
    assert lines[0].endswith(" (logged once)")


def test_idle_connections_do_not_keep_agents_out(start_run: StartRun) -> None:
    run = start_run()
    parties = [run.party(0)]
    form(parties)
    with ExitStack() as stack:
        for number in range(200):
            stranger = stack.enter_context(connect_to(parties[0]))
            # Half of them have begun to say something.
            stranger.sendall(b"\x00\x00\x00"[: number % 2 * 3])
        joining = run.party(1)
        joining.join()
        interrupted(parties, Reason.NODE_JOINED)
        assert {place.nodes for place in form(parties)} == {2}


def test_a_handshake_that_is_never_completed_is_cut_off(
    start_run: StartRun, leaders: list[Leader], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slurm_elastic.rendezvous.transport.listener._HANDSHAKE_TIMEOUT", 0.1)
    party = start_run().party(0)
    form([party])
    connections = leaders[0]._connections._connections
    before = connections[party.config.agent]
    with connect_to(party, "127.0.0.3") as stranger:
        stranger.sendall(b"\x00\x00")
        assert closed(stranger)
    assert leaders[0].rejected["127.0.0.3" if "127.0.0.3" in leaders[0].rejected else "::ffff:127.0.0.3"] == 1
    # Those that have completed it stay, and their time would be over by now, too.
    assert connections[party.config.agent] is before
    assert party.silent()


def test_records_of_another_run_are_dropped(
    start_run: StartRun, tmp_path_factory: pytest.TempPathFactory, leaders: list[Leader]
) -> None:
    run, other = start_run(), start_run(tmp_path_factory.mktemp("other"))
    party = run.party(0)
    form([party])
    # The other run's agents are sent here: right protocol, right names, another secret.
    port = json.loads(party.config.run_dir.endpoint("run.0") or b"")["port"]
    misled = Coordination(
        FollowerConfig(
            run="run.0",
            secret=other.run_dir.secret(),
            agent="node2/7.0/1",
            locate=lambda: LeaderLocation((("127.0.0.1", port),), published=True),
            # It has to have heard an answer by then, from a thread that may have to wait for a processor.
            connect_timeout=2.0,
        ),
        socket.create_server(("127.0.0.1", 0)),
        lambda campaign: pytest.fail("it campaigns"),
    )
    misled.start()
    misled.join(party.config.agent_info(1))
    word = misled.next_event(timeout=PATIENCE)
    misled.stop()
    assert isinstance(word, Unreachable)
    assert "is a leader of this run by another run directory" in word.why
    assert party.silent()


def test_a_recorded_session_played_back_is_dropped(start_run: StartRun, leaders: list[Leader]) -> None:
    run = start_run()
    party = run.party(0)
    form([party])
    recorded = _record_a_session(run, party)
    before = sum(leaders[0].rejected.values())
    with connect_to(party) as stranger:
        stranger.sendall(recorded)
        assert closed(stranger)
    assert sum(leaders[0].rejected.values()) == before + 1
    assert party.silent()


def test_a_greeting_that_is_sent_again_takes_no_room(start_run: StartRun, leaders: list[Leader]) -> None:
    run = start_run()
    parties = run.all_of(2)
    form(parties)
    # As an agent has said it on a port where it expected the leader, and another user listened.
    greeting = Session(Role.AGENT, run.run_dir.secret(), "run.0", agent=parties[1].config.agent).start()
    with ExitStack() as stack:
        strangers = [stack.enter_context(connect_to(parties[0])) for _ in range(20)]
        for stranger in strangers:
            stranger.sendall(greeting)
        assert sum(b"proof" in stranger.recv(4096) for stranger in strangers) == 1
        assert sum(leaders[0].rejected.values()) == 19
        eventually(lambda: len(leaders[0]._connections._on_their_way) == 1)
    assert all(party.silent() for party in parties)


def _record_a_session(run: Run, party: Party) -> bytes:
    """What an agent of this run sends from its greeting on, up to the word that it leaves."""
    agent = Session(Role.AGENT, run.run_dir.secret(), "run.0", agent="node2/7.0/9")
    with connect_to(party) as stream:
        agent.port = stream.getpeername()[1]
        recorded = agent.start()
        stream.sendall(recorded)
        while not agent.established:
            _, answer = agent.receive(stream.recv(4096))
            recorded += answer
            stream.sendall(answer)
        last = agent.seal(encode(Finished("node2/7.0/9", 0)))
        stream.sendall(last)
    return recorded + last


def test_an_agent_that_speaks_for_another_is_not_heard(start_run: StartRun, leaders: list[Leader]) -> None:
    run = start_run()
    parties = run.all_of(2)
    form(parties)
    agent = Session(Role.AGENT, run.run_dir.secret(), "run.0", agent="node9/7.0/9")
    with connect_to(parties[0]) as stream:
        agent.port = stream.getpeername()[1]
        stream.sendall(agent.start())
        while not agent.established:
            stream.sendall(agent.receive(stream.recv(4096))[1])
        for party in parties:
            stream.sendall(agent.seal(encode(Finished(party.config.agent, 0))))
        eventually(lambda: sum(leaders[0].rejected.values()) == 2)
    assert all(party.silent() for party in parties)
    assert not run.run_dir.is_done()


def test_an_agent_of_another_protocol_is_told_so_and_ends(
    start_run: StartRun, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = start_run()
    leader = run.party(0)
    with connect_to(leader) as stream:
        monkeypatch.setattr(session, "PROTOCOL", 17)
        agent = Session(Role.AGENT, run.run_dir.secret(), "run.0", agent="node2/7.0/9")
        hello = agent.start()
        monkeypatch.undo()
        with caplog.at_level(logging.WARNING):
            stream.sendall(hello)
            answer = b""
            while data := stream.recv(4096):
                answer += data
        monkeypatch.setattr(session, "PROTOCOL", 17)
        with pytest.raises(session.VersionError, match="install the same version on all nodes"):
            agent.receive(answer)
    assert "there speaks protocol 17" in caplog.text
