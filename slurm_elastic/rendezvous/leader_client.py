"""The client that asks the leader of a run for one thing, from outside of the run: for people and scripts."""

from __future__ import annotations

import itertools
import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass

from slurm_elastic.errors import SlurmElasticError
from slurm_elastic.rendezvous.leader.fenced_records import newest_endpoint
from slurm_elastic.rendezvous.leave_requests import LeaveAnswer, LeaveRequest
from slurm_elastic.rendezvous.records.api import RunDirRecords
from slurm_elastic.rendezvous.status_requests import StatusAnswer, StatusPart, StatusRequest
from slurm_elastic.rendezvous.transport.messages import LeaderMessage, MessageError, decode_leader_message, encode
from slurm_elastic.rendezvous.transport.session import Role, Session, SessionError
from slurm_elastic.rundir import RunDir

__all__ = ["LeaderPlace", "NoAnswerError", "ask_status", "ask_to_leave", "client_name", "find_leader"]


class NoAnswerError(SlurmElasticError):
    """No leader of the run answers."""


@dataclass(frozen=True, slots=True)
class LeaderPlace:
    """The place of the leader of a run.

    Attributes:
        address, port: of the leader, as it published them.
        scope: of its records.
        secret: of the run.
    """

    address: str
    port: int
    scope: str
    secret: bytes


_numbers = itertools.count(1)


def client_name() -> str:
    """Return an identity that no agent and no other client has.

    The leader closes a connection when another one comes with its identity, and a process may ask twice at a time.
    """
    return f"client on {socket.gethostname()}, process {os.getpid()}, request {next(_numbers)}"


def find_leader(run_dir: RunDir) -> LeaderPlace:
    """Return where the newest leader of a run is, by the run's records.

    Raises:
        NoAnswerError: No leader has published an endpoint.
        RunDirError: The secret of the run cannot be read.
    """
    secret = run_dir.secret()
    for scope in sorted(run_dir.scopes(), key=_restart_order, reverse=True):
        endpoint = newest_endpoint(RunDirRecords(run_dir, scope).situation(), scope)
        if endpoint is not None and "address" in endpoint:
            return LeaderPlace(str(endpoint["address"]), int(endpoint["port"]), scope, secret)
    raise NoAnswerError("no leader has published an endpoint")


def ask_to_leave(leader: LeaderPlace, request: LeaveRequest, timeout: float = 10.0) -> LeaveAnswer:
    """Have the leader ask agents to leave.

    Args:
        leader: Of the run.
        request: To pass on.
        timeout: Seconds in all.

    Raises:
        NoAnswerError: The leader does not answer, or another program does.
    """
    for message in _converse(leader, request, timeout):
        if isinstance(message, LeaveAnswer):
            return message
    raise _closed(leader)


def ask_status(leader: LeaderPlace, timeout: float = 10.0) -> tuple[StatusAnswer, dict[str, str]]:
    """Have the leader ask all agents what they do now.

    Args:
        leader: Of the run.
        timeout: Seconds in all.

    Returns:
        The leader's answer, and the report of each agent that has answered, by its identity.

    Raises:
        NoAnswerError: The leader does not answer, or another program does, or too many clients ask it.
    """
    reports: dict[str, str] = {}
    for message in _converse(leader, StatusRequest(client_name()), timeout):
        if isinstance(message, StatusPart):
            reports.update(message.reports)
        elif isinstance(message, StatusAnswer):
            if message.busy:
                raise NoAnswerError(f"too many clients ask the leader at {leader.address}:{leader.port}")
            return message, reports
    raise _closed(leader)


def _converse(leader: LeaderPlace, request: LeaveRequest | StatusRequest, timeout: float) -> Iterator[LeaderMessage]:
    """Yield what the leader says after the request. Both sides prove the run's secret first."""
    deadline = time.monotonic() + timeout
    try:
        with closing(socket.create_connection((leader.address, leader.port), timeout)) as connection:
            session = Session(Role.AGENT, leader.secret, leader.scope, agent=request.agent, port=leader.port)
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
    except (OSError, SessionError, MessageError, OverflowError) as error:
        problem = f"the leader at {leader.address}:{leader.port} does not answer: {error or 'time-out'}"
        raise NoAnswerError(problem) from None


def _closed(leader: LeaderPlace) -> NoAnswerError:
    return NoAnswerError(f"the leader at {leader.address}:{leader.port} has closed the connection")


def _restart_order(scope: str) -> tuple[str, int]:
    """Sort scopes by their restart count: ``7.10`` after ``7.9``."""
    match = re.fullmatch(r"(.*)\.([0-9]+)", scope)
    return (match[1], int(match[2])) if match else (scope, -1)
