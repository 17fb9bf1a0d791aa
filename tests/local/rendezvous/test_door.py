"""The place where connections come in, while what serves them comes and goes."""

from __future__ import annotations

import asyncio
import socket
from typing import ClassVar

import pytest

from slurm_elastic.rendezvous.transport.listener import Door


class Served(asyncio.Protocol):
    """A connection that somebody knows of."""

    made: ClassVar[list[asyncio.BaseTransport]] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.made.append(transport)


@pytest.mark.parametrize("turns", range(10))
def test_whoever_comes_while_it_closes_is_turned_away(turns: int) -> None:
    async def come() -> bytes:
        with (
            socket.create_server(("127.0.0.1", 0)) as listener,
            socket.create_connection(listener.getsockname()) as visitor,
        ):
            door = Door(listener, Served)
            # In so many turns of the loop it is accepted, or served even.
            for _ in range(turns):
                await asyncio.sleep(0)
            door.close()
            for transport in Served.made:
                transport.close()
            # Whoever was not accepted is so by the next one.
            last = Door(listener, None)
            visitor.setblocking(False)
            try:
                return await asyncio.wait_for(asyncio.get_running_loop().sock_recv(visitor, 1), 10)
            finally:
                last.close()

    Served.made.clear()
    assert asyncio.run(come()) == b""


def test_a_process_without_descriptors_serves_again_when_it_has_some() -> None:
    async def come() -> bytes:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            refused: list[int] = []

            class Full(socket.socket):
                def accept(self) -> tuple[socket.socket, object]:
                    if not refused:
                        refused.append(1)
                        raise OSError(24, "Too many open files")
                    return super().accept()

            full = Full(fileno=listener.detach())
            with full, socket.create_connection(full.getsockname()) as visitor:
                door = Door(full, None)
                visitor.setblocking(False)
                try:
                    return await asyncio.wait_for(asyncio.get_running_loop().sock_recv(visitor, 1), 10)
                finally:
                    door.close()
                    assert refused

    assert asyncio.run(come()) == b""
