from __future__ import annotations

import json
import struct
from collections.abc import Callable

import pytest

from slurm_elastic.rendezvous.transport import session

SECRET = bytes(range(32))
AGENT = "node1/7.0/42"


def agent(secret: bytes = SECRET, run: str = "7.0") -> session.Session:
    return session.Session(session.Role.AGENT, secret, run, agent=AGENT)


def leader(secret: bytes = SECRET, run: str = "7.0", epoch: int = 5) -> session.Session:
    return session.Session(session.Role.LEADER, secret, run, epoch=epoch)


def shake_hands(one: session.Session, other: session.Session) -> tuple[list[bytes], list[bytes]]:
    """Let both talk until nothing is left to say; return what each of them sent."""
    sent: tuple[list[bytes], list[bytes]] = ([one.start()], [other.start()])
    message, turn = sent[0][0], 1
    while message:
        messages, message = (one, other)[turn].receive(message)
        assert messages == []
        sent[turn].append(message)
        turn = 1 - turn
    return sent


def answer_to(greeting: bytes, other: session.Session) -> bytes:
    """What the listening end answers to a greeting, also where it closes the connection afterwards."""
    try:
        return other.receive(greeting)[1]
    except session.SessionError as error:
        return error.answer


def connected() -> tuple[session.Session, session.Session]:
    one, other = agent(), leader()
    shake_hands(one, other)
    return one, other


def frame(content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + content


def greeting(**changes: object) -> bytes:
    """An agent's first frame with some fields changed; None takes one out."""
    fields = {"hello": "slurm_elastic", "protocol": session.PROTOCOL, "version": "1.0", "nonce": "0" * 32, **changes}
    return frame(json.dumps({key: value for key, value in fields.items() if value is not None}).encode())


def test_each_end_learns_who_the_other_is() -> None:
    one, other = agent(), leader(epoch=5)
    shake_hands(one, other)
    assert one.established
    assert other.established
    assert other.admitted
    assert one.epoch == 5
    assert other.agent == AGENT


def test_messages_go_both_ways_in_order() -> None:
    one, other = connected()
    assert other.receive(one.seal(b'{"n": 1}') + one.seal(b'{"n": 2}')) == ([{"n": 1}, {"n": 2}], b"")
    assert one.receive(other.seal(b'{"n": 3}')) == ([{"n": 3}], b"")
    assert other.receive(one.seal(b'{"n": 4}')) == ([{"n": 4}], b"")


def test_a_stream_may_come_byte_by_byte() -> None:
    one, other = agent(), leader()
    pending = {session.Role.AGENT: other.start(), session.Role.LEADER: one.start()}
    while any(pending.values()):
        for receiver in (other, one):
            data, pending[receiver.role] = pending[receiver.role], b""
            for value in data:
                messages, answer = receiver.receive(bytes([value]))
                assert messages == []
                pending[session.Role.AGENT if receiver is other else session.Role.LEADER] += answer
    received = [messages for value in one.seal(b'{"n": 1}') for messages in other.receive(bytes([value]))[0]]
    assert received == [{"n": 1}]


def test_the_handshake_and_the_first_message_may_come_at_once() -> None:
    one, other = agent(), leader()
    _, answer = other.receive(one.start())
    _, proof = one.receive(answer)
    assert other.receive(proof + one.seal(b'{"n": 1}')) == ([{"n": 1}], b"")
    assert other.agent == AGENT


def test_a_leader_that_cannot_prove_to_lead_this_run_is_foreign() -> None:
    one = agent(run="7.1")
    answer = answer_to(one.start(), leader())
    with pytest.raises(session.ForeignError, match="another run, or another secret"):
        one.receive(answer)
    assert not one.established


def test_a_leader_of_this_run_with_another_secret_is_told_from_others() -> None:
    one = agent(secret=bytes(32))
    answer = answer_to(one.start(), leader())
    with pytest.raises(session.TwinError, match="another run directory"):
        one.receive(answer)
    assert not one.established


@pytest.mark.parametrize(
    "hello",
    [
        pytest.param(greeting(), id="without a tag"),
        pytest.param(greeting(agent=AGENT, tag="0" * 64), id="with a wrong tag"),
        pytest.param(greeting(agent=AGENT, tag="\udfff"), id="with a tag that is not ASCII"),
        pytest.param(greeting(agent=[AGENT], tag="0" * 64), id="of no agent"),
        pytest.param(
            session.Session(session.Role.AGENT, bytes(32), "7.0", agent=AGENT).start(), id="with another secret"
        ),
    ],
)
def test_a_greeting_that_proves_no_membership_admits_nobody(hello: bytes) -> None:
    other = leader()
    with pytest.raises(session.ForeignError, match="another run, or another secret"):
        other.receive(hello)
    assert not other.admitted


def test_a_greeting_counts_for_the_agent_that_it_names() -> None:
    hello = json.loads(agent().start()[4:])
    with pytest.raises(session.ForeignError):
        leader().receive(frame(json.dumps({**hello, "agent": "node2/7.0/1"}).encode()))


def test_a_leader_proves_the_port_that_it_listens_on() -> None:
    one, other = agent(), leader()
    # Somebody listens on another port, and passes on what both say.
    one.port, other.port = 20001, 20000
    with pytest.raises(session.ForeignError):
        one.receive(other.receive(one.start())[1])
    one, other = agent(), leader()
    one.port = other.port = 20000
    shake_hands(one, other)
    assert one.established


def test_an_agent_that_leads_nobody_proves_to_be_of_the_run() -> None:
    one = agent()
    idle = session.Session(session.Role.LEADER, SECRET, "7.0", refuses=lambda agent, nonce: 0.0)
    with pytest.raises(session.ClosedError):
        one.receive(answer_to(one.start(), idle))
    assert not idle.admitted
    # It says nothing to others, and nobody says it in its place.
    stranger = agent(secret=bytes(32))
    assert (
        answer_to(
            stranger.start(), session.Session(session.Role.LEADER, SECRET, "7.0", refuses=lambda agent, nonce: 0.0)
        )
        == b""
    )
    one = agent()
    with pytest.raises(session.ForeignError, match="wrong proof"):
        one.receive(greeting(refused=0.0, proof="0" * 64))


def test_a_leader_without_room_says_when_to_come_again() -> None:
    one = agent()
    busy = session.Session(
        session.Role.LEADER, SECRET, "7.0", epoch=5, refuses=lambda name, _: 1.25 if name == AGENT else None
    )
    with pytest.raises(session.BusyError) as told:
        one.receive(answer_to(one.start(), busy))
    assert told.value.seconds == 1.25
    assert not busy.admitted
    one = agent()
    with pytest.raises(session.ForeignError, match="wrong proof"):
        one.receive(greeting(refused=60.0, proof="0" * 64))


def test_an_agent_proves_its_own_name_only() -> None:
    one, other = agent(), leader()
    _, answer = other.receive(one.start())
    _, proof = one.receive(answer)
    claim = {**json.loads(proof[4:]), "agent": "node2/7.0/1"}
    with pytest.raises(session.ForeignError):
        other.receive(frame(json.dumps(claim).encode()))


def test_a_leader_proves_its_own_epoch_only() -> None:
    one, other = agent(), leader(epoch=5)
    _, answer = other.receive(one.start())
    claim = {**json.loads(answer[4:]), "epoch": 6}
    with pytest.raises(session.ForeignError):
        one.receive(frame(json.dumps(claim).encode()))


def test_a_recorded_session_cannot_be_played_back() -> None:
    one, other = agent(), leader()
    from_agent, from_leader = shake_hands(one, other)
    recorded = b"".join(from_agent) + one.seal(b'{"n": 1}')
    with pytest.raises(session.ForeignError):
        leader().receive(recorded)
    fresh = agent()
    fresh.start()
    with pytest.raises(session.ForeignError):
        fresh.receive(b"".join(from_leader))


def test_what_a_leader_says_cannot_be_sent_back_to_it() -> None:
    one, other = connected()
    with pytest.raises(session.SessionError, match="wrong code"):
        other.receive(other.seal(b'{"n": 1}'))
    with pytest.raises(session.SessionError, match="wrong code"):
        one.receive(one.seal(b'{"n": 1}'))


@pytest.mark.parametrize(
    "tamper",
    [
        pytest.param(lambda first, second: first + first, id="repeated"),
        pytest.param(lambda first, second: second + first, id="reordered"),
        pytest.param(lambda first, second: second, id="left out"),
        pytest.param(lambda first, second: first[:-2] + b"2}", id="content changed"),
        pytest.param(lambda first, second: first[:4] + bytes([first[4] ^ 1]) + first[5:], id="code changed"),
        pytest.param(lambda first, second: frame(first[4:-1]), id="shortened"),
        pytest.param(lambda first, second: frame(b""), id="empty"),
        pytest.param(lambda first, second: frame(b'{"n": 1}'), id="without code"),
    ],
)
def test_a_frame_that_is_not_the_next_one_ends_the_session(tamper: Callable[[bytes, bytes], bytes]) -> None:
    one, other = connected()
    first, second = one.seal(b'{"n": 1}'), one.seal(b'{"n": 2}')
    with pytest.raises(session.SessionError, match="wrong code"):
        other.receive(tamper(first, second))


def test_a_frame_of_another_session_of_the_same_agent_is_refused() -> None:
    one, _ = connected()
    _, other = connected()
    with pytest.raises(session.SessionError, match="wrong code"):
        other.receive(one.seal(b'{"n": 1}'))


@pytest.mark.parametrize("content", [b"[1]", b"1", b"{", b"\xff\xfe", b"[" * 100_000])
def test_content_with_a_right_code_still_has_to_be_a_json_object(content: bytes) -> None:
    one, other = connected()
    with pytest.raises(session.SessionError, match="no JSON"):
        other.receive(one.seal(content))


STRANGERS = {
    "garbage": bytes(range(256)),
    "HTTP": b"GET / HTTP/1.1\r\nHost: node1\r\n\r\n",
    "a huge length": b"\xff\xff\xff\xff",
    "a length above that of greetings": struct.pack(">I", 4097),
    "an empty frame": frame(b""),
    "no JSON": frame(b"hello"),
    "nested too deep": frame(b"[" * 4000),
    "a number too long": frame(b'{"hello": ' + b"1" * 4000 + b"}"),
    "no object": frame(b"[]"),
    "another program": greeting(hello="torch"),
    "no nonce": greeting(nonce=None),
    "a short nonce": greeting(nonce="0"),
    "a nonce of another type": greeting(nonce=[0] * 32),
    "no protocol": greeting(protocol=None),
    "no version": greeting(version=None),
    "a version that would confuse a terminal": greeting(version="1\x1b[2J\n"),
    "no name": greeting() + frame(b'{"proof": ""}'),
    "an empty name": greeting() + frame(b'{"agent": "", "proof": ""}'),
    "no proof": greeting() + frame(b'{"agent": "a"}'),
    "a proof that is no text": greeting() + frame(b'{"agent": "a", "proof": 1}'),
    "a proof that is not ASCII": greeting() + frame(b'{"agent": "a", "proof": "\\ud800"}'),
    "a nonce of surrogates": greeting(nonce="\ud800" * 32) + frame(b'{"agent": "\\ud800", "proof": "0"}'),
}


@pytest.mark.parametrize("data", STRANGERS.values(), ids=STRANGERS)
@pytest.mark.parametrize("role", list(session.Role))
def test_strangers_are_foreign(role: session.Role, data: bytes) -> None:
    end = session.Session(role, SECRET, "7.0", agent=AGENT if role is session.Role.AGENT else "")
    end.start()
    with pytest.raises(session.ForeignError) as error:
        end.receive(data)
    assert str(error.value).isprintable()
    assert not end.established


@pytest.mark.parametrize("data", [b"", b"\x00", b"\x00\x00\x0f", greeting()[:-1]])
def test_a_truncated_frame_is_waited_for(data: bytes) -> None:
    assert leader().receive(data) == ([], b"")


def test_a_frame_after_the_handshake_has_a_limit_too() -> None:
    one, other = connected()
    with pytest.raises(session.SessionError, match="a frame of 1048577 bytes"):
        other.receive(struct.pack(">I", (1 << 20) + 1))
    content = json.dumps({"text": "x" * 100_000}).encode()
    one, other = connected()
    assert other.receive(one.seal(content))[0] == [json.loads(content)]


def test_agents_of_another_protocol_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    older = agent()
    monkeypatch.setattr(session, "PROTOCOL", 17)
    monkeypatch.setattr(session, "__version__", "9.8.7")
    hello = older.start()
    monkeypatch.undo()
    newer = leader()
    with pytest.raises(session.VersionError) as at_leader:
        newer.receive(hello)
    assert "slurm_elastic 9.8.7 there speaks protocol 17" in str(at_leader.value)
    assert f"here speaks {session.PROTOCOL}" in str(at_leader.value)

    monkeypatch.setattr(session, "PROTOCOL", 17)
    monkeypatch.setattr(session, "__version__", "9.8.7")
    with pytest.raises(session.VersionError) as at_agent:
        older.receive(at_leader.value.answer)
    assert "9.8.7 here speaks 17; install the same version on all nodes" in str(at_agent.value)


def test_another_run_of_another_protocol_is_merely_foreign(monkeypatch: pytest.MonkeyPatch) -> None:
    other = leader(secret=bytes(32))
    one = agent()
    hello = one.start()
    monkeypatch.setattr(session, "PROTOCOL", 17)
    with pytest.raises(session.VersionError) as refused:
        other.receive(hello)
    monkeypatch.undo()
    with pytest.raises(session.ForeignError):
        one.receive(refused.value.answer)
