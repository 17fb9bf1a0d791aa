"""The place where connections come in, while what serves them comes and goes."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import ExitStack

import pytest

from slurm_elastic.rendezvous.transport import listener as listener_module
from slurm_elastic.rendezvous.transport.connection import open_link
from slurm_elastic.rendezvous.transport.listener import Listener
from slurm_elastic.rendezvous.transport.session import ClosedError, Role, Session, SessionError

SECRET = bytes(range(32))


def idle() -> Session:
    """Return the listening end of a session where no leader runs."""
    return Session(Role.LEADER, SECRET, "7.0", refuses=lambda agent, nonce: 0.0)


@pytest.mark.parametrize("turns", range(10))
def test_whoever_comes_while_a_leader_ends_is_turned_away(turns: int) -> None:
    served: list[socket.socket] = []

    async def come() -> bytes:
        with (
            socket.create_server(("127.0.0.1", 0)) as listening,
            socket.create_connection(listening.getsockname()) as admitted,
        ):
            listener = Listener(listening, idle)
            listener.admit(
                lambda: Session(Role.LEADER, SECRET, "7.0"),
                lambda *admitted: served.append(admitted[-1]),
                lambda peer, why: None,
                lambda: 8,
            )
            admitted.sendall(Session(Role.AGENT, SECRET, "7.0", agent="node1/7.0/1").start())
            # In so many turns of the loop it is accepted, or served even.
            for _ in range(turns):
                await asyncio.sleep(0)
            listener.turn_away()
            for stream in served:
                stream.close()
            admitted.setblocking(False)
            try:
                # A greeting may have been answered; after that there is nobody.
                while await asyncio.wait_for(_received(admitted), 10):
                    pass
                return b""
            finally:
                listener.close()

    assert asyncio.run(come()) == b""


def _close() -> Session:
    """As any program may."""
    raise ConnectionAbortedError


async def _received(admitted: socket.socket) -> bytes:
    try:
        return await asyncio.get_running_loop().sock_recv(admitted, 4096)
    except ConnectionResetError:
        return b""


def test_a_member_on_its_way_is_never_dropped_for_strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener_module, "STRANGERS", 8)
    dropped: list[str] = []
    served: list[socket.socket] = []

    async def come() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening, ExitStack() as stack:
            address = listening.getsockname()

            def connected() -> socket.socket:
                return stack.enter_context(socket.create_connection(address))

            listener = Listener(listening, idle)
            listener.admit(
                lambda: Session(Role.LEADER, SECRET, "7.0"),
                lambda *admitted: served.append(admitted[-1]),
                lambda peer, why: dropped.append(why),
                lambda: 8,
            )
            member = connected()
            member.sendall(Session(Role.AGENT, SECRET, "7.0", agent="node1/7.0/1").start())
            for _ in range(40):
                connected()
                await asyncio.sleep(0)
            while len(dropped) < 32:
                await asyncio.sleep(0.01)
            assert len(served) == 1
            assert served[0].fileno() >= 0
            listener.close()
            served[0].close()

    asyncio.run(asyncio.wait_for(come(), 10))
    assert set(dropped) == {"one of too many connections that have said nothing"}
    assert len(dropped) == 32


def test_an_idle_agent_is_told_from_a_program_that_took_its_port() -> None:
    async def come(new_session: Callable[[], Session]) -> Exception:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            listener = Listener(listening, new_session)
            try:
                agent = Session(Role.AGENT, SECRET, "7.0", agent="node1/7.0/1")
                await open_link(listening.getsockname(), agent, lambda link, message: None)
            except SessionError as error:
                return error
            finally:
                listener.close()
            raise AssertionError("it leads")

    told = asyncio.run(come(idle))
    assert isinstance(told, ClosedError)
    assert not isinstance(asyncio.run(come(_close)), ClosedError)
    another = asyncio.run(come(lambda: Session(Role.LEADER, bytes(32), "7.0", refuses=lambda agent, nonce: 0.0)))
    assert not isinstance(another, ClosedError)


def test_a_process_without_descriptors_serves_again_when_it_has_some() -> None:
    async def come() -> bytes:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            refused: list[int] = []

            class Full(socket.socket):
                def accept(self) -> tuple[socket.socket, object]:
                    if not refused:
                        refused.append(1)
                        raise OSError(24, "Too many open files")
                    return super().accept()

            full = Full(fileno=listening.detach())
            with full, socket.create_connection(full.getsockname()) as admitted:
                listener = Listener(full, idle)
                admitted.sendall(Session(Role.AGENT, SECRET, "7.0", agent="node1/7.0/1").start())
                admitted.setblocking(False)
                try:
                    return await asyncio.wait_for(asyncio.get_running_loop().sock_recv(admitted, 1), 10)
                finally:
                    listener.close()
                    assert refused

    assert asyncio.run(come()) != b""
