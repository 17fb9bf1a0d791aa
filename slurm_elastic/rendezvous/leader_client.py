"""The client that asks the leader of a run for one thing, from outside of the run: for people and scripts."""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass

from slurm_elastic.errors import SlurmElasticError
from slurm_elastic.rendezvous.leader.fenced_records import newest_endpoint
from slurm_elastic.rendezvous.records.api import RunDirRecords
from slurm_elastic.rendezvous.transport import messages
from slurm_elastic.rendezvous.transport.session import Role, Session, SessionError
from slurm_elastic.rundir import RunDir
from slurm_elastic.slurm import natural_key

_TIMEOUT = 10.0
"""Seconds for a request and all of its answers."""


class NoAnswerError(SlurmElasticError):
    """No leader of the run answers."""


@dataclass(frozen=True, slots=True)
class LeaderEndpoint:
    """The endpoint that the leader of an incarnation has published, and the secret by which both ends prove the run."""

    address: str
    port: int
    incarnation: str
    secret: bytes


_numbers = itertools.count(1)


def client_name() -> str:
    """Return an identity that no agent and no other client has.

    The leader closes a connection when another one comes with its identity, and a process may ask twice at a time.
    """
    return f"client on {socket.gethostname()}, process {os.getpid()}, request {next(_numbers)}"


def find_leader(run_dir: RunDir) -> LeaderEndpoint:
    """Return where the newest leader of a run is, by the run's records.

    Raises:
        NoAnswerError: No leader has published an endpoint.
        RunDirError: The secret of the run cannot be read.
    """
    secret = run_dir.secret()
    for incarnation in sorted(run_dir.keys("endpoints"), key=natural_key, reverse=True):
        endpoint = newest_endpoint(RunDirRecords(run_dir, incarnation).situation(), incarnation)
        if endpoint is not None and "address" in endpoint:
            return LeaderEndpoint(str(endpoint["address"]), int(endpoint["port"]), incarnation, secret)
    raise NoAnswerError("no leader has published an endpoint")


def ask_to_leave(leader: LeaderEndpoint, request: messages.LeaveRequest) -> messages.LeaveAnswer:
    """Have the leader ask agents to leave.

    Raises:
        NoAnswerError: The leader does not answer within 10 s, or another program does.
    """
    return next(message for message in _converse(leader, request) if isinstance(message, messages.LeaveAnswer))


def ask_status(leader: LeaderEndpoint) -> tuple[messages.StatusAnswer, dict[str, str]]:
    """Have the leader ask all agents what they do now.

    Returns:
        The leader's answer, and the report of each agent that has answered, by its identity.

    Raises:
        NoAnswerError: The leader does not answer within 10 s, or another program does, or too many clients ask it.
    """
    reports: dict[str, str] = {}
    received = _converse(leader, messages.StatusRequest(client_name()))
    while not isinstance(message := next(received), messages.StatusAnswer):
        if isinstance(message, messages.StatusPart):
            reports.update(message.reports)
    if message.busy:
        raise NoAnswerError(f"too many clients ask the leader at {leader.address}:{leader.port}")
    return message, reports


def _converse(
    leader: LeaderEndpoint, request: messages.LeaveRequest | messages.StatusRequest
) -> Iterator[messages.LeaderMessage]:
    """Yield the leader's messages after the request, until it closes the connection, which is an error.

    Both ends prove the run's secret first.
    """
    deadline = time.monotonic() + _TIMEOUT
    try:
        with closing(socket.create_connection((leader.address, leader.port), _TIMEOUT)) as connection:
            session = Session(Role.AGENT, leader.secret, leader.incarnation, agent=request.agent, port=leader.port)
            connection.sendall(session.start())
            asked = False
            while True:
                connection.settimeout(max(0.001, deadline - time.monotonic()))
                data = connection.recv(65536)
                if not data:
                    raise NoAnswerError(f"the leader at {leader.address}:{leader.port} has closed the connection")
                received, answer = session.receive(data)
                connection.sendall(answer)
                if session.established and not asked:
                    asked = True
                    connection.sendall(session.seal(messages.encode(request)))
                for message in received:
                    yield messages.decode_leader_message(message)
    except (OSError, SessionError, messages.MessageError, OverflowError) as error:
        problem = f"the leader at {leader.address}:{leader.port} does not answer: {error or 'time-out'}"
        raise NoAnswerError(problem) from None
