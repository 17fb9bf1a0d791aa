"""The client that says one thing to the leader of a run, from outside of it: for people and scripts."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import closing

from slurm_elastic.errors import SlurmElasticError
from slurm_elastic.rendezvous.leave_requests import LeaveAnswer, LeaveRequest
from slurm_elastic.rendezvous.transport.messages import MessageError, decode_leader_message, encode
from slurm_elastic.rendezvous.transport.session import Role, Session, SessionError

__all__ = ["VisitError", "ask", "client_name"]


class VisitError(SlurmElasticError):
    """Nobody who leads the run answers."""


def client_name() -> str:
    """An identity that no agent has."""
    return f"visitor on {socket.gethostname()}, process {os.getpid()}"


def ask(
    address: str, port: int, scope: str, secret: bytes, request: LeaveRequest, timeout: float = 10.0
) -> LeaveAnswer:
    """Pass a request to the leader and wait for its answer. Both sides prove the run's secret first.

    Args:
        address, port: of the leader, as it published them.
        scope: of its records.
        secret: of the run.
        request: to pass on.
        timeout: seconds in all.

    Raises:
        VisitError: nobody answers there, or somebody else.
    """
    deadline = time.monotonic() + timeout
    try:
        with closing(socket.create_connection((address, port), timeout)) as connection:
            for message in _converse(
                connection, Session(Role.AGENT, secret, scope, agent=request.agent, port=port), request, deadline
            ):
                if isinstance(message, LeaveAnswer):
                    return message
    except (OSError, SessionError, MessageError) as error:
        raise VisitError(f"the leader at {address}:{port} does not answer: {error or 'time-out'}") from None
    raise VisitError(f"the leader at {address}:{port} has closed the connection")


def _converse(connection: socket.socket, session: Session, request: LeaveRequest, deadline: float) -> Iterator[object]:
    connection.sendall(session.start())
    asked = False
    while True:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        data = connection.recv(65536)
        if not data:
            return
        messages, answer = session.receive(data)
        connection.sendall(answer)
        if session.established and not asked:
            asked = True
            connection.sendall(session.seal(encode(request)))
        for message in messages:
            yield decode_leader_message(message)
