"""An agent's link to the leader: find it, prove who one is, speak and listen, and connect again when it breaks.

Runs in an asyncio loop. What the leader says that concerns this agent is handed to `deliver`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from slurm_elastic.rendezvous.membership import (
    Candidate,
    LeaveReason,
    Ponged,
    Slowest,
    WorkerFailure,
)
from slurm_elastic.rendezvous.messages import (
    AgentMessage,
    Beat,
    Ended,
    Holding,
    Interrupted,
    LeaderMessage,
    MessageError,
    Placed,
    Probed,
    Stopping,
    Waiting,
    decode_leader_message,
    encode,
)
from slurm_elastic.rendezvous.participant import Participant
from slurm_elastic.rendezvous.requests import LeaveRequest, LeaveRequested
from slurm_elastic.rendezvous.session import ForeignError, Role, Session, SessionError, VersionError

__all__ = ["LeaderLost", "LeaderRefusedError", "Member", "MemberSettings", "Unreachable", "Word"]

logger = logging.getLogger(__name__)

_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 0.5
_ATTEMPT_TIMEOUT = 3.0


class LeaderRefusedError(Exception):
    """The agent that should lead cannot, for a reason that a person has to mend."""


@dataclass(frozen=True, slots=True)
class LeaderLost:
    """The leader is gone; until somebody takes over, this run cannot change its membership."""

    why: str


@dataclass(frozen=True, slots=True)
class Unreachable:
    """No leader of this run was found, or it cannot be spoken with. `usage` if a person has to mend something."""

    why: str
    usage: bool = False


Word = Placed | Holding | Stopping | Interrupted | LeaveRequested | Waiting | Ended | LeaderLost | Unreachable


@dataclass(frozen=True, slots=True)
class MemberSettings:
    """How to find and keep the leader.

    Attributes:
        run: run id and incarnation.
        secret: the run's secret.
        agent: own identity.
        locate: says where the leader may be, in the order in which to try; may block, and is asked again while nobody
            is found. Raises LeaderRefusedError if there will be none.
        connect_timeout: seconds until the first connection must stand.
        heartbeat_limit: seconds of silence after which another connection is tried.
        leader_limit: seconds of silence, or without connection, after which the leader is lost.
        can_hold: whether there is somebody who answers :class:`~.messages.Holding`; else the link says at once that the
            workers take no part.
    """

    run: str
    secret: bytes
    agent: str
    locate: Callable[[], Sequence[tuple[str, int]]]
    connect_timeout: float = 600.0
    heartbeat_limit: float = 3.0
    leader_limit: float = 30.0
    can_hold: bool = False


class Member:
    """One agent's end of the membership protocol. All methods are called in the loop's thread."""

    def __init__(
        self,
        settings: MemberSettings,
        deliver: Callable[[Word], None],
        slowest: Callable[[], Slowest | None] = lambda: None,
    ) -> None:
        self._settings, self._slowest = settings, slowest
        self._deliver = deliver
        self._participant = Participant(settings.agent)
        self._link: _Link | None = None
        self._over = False

    async def run(self) -> None:
        """Connect and stay connected until the run has ended or :meth:`close` was called."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._settings.connect_timeout
        link = await self._find(deadline, again=False)
        while link is not None:
            self._use(link)
            await self._watch(link)
            if self._over:
                return
            deadline = loop.time() + self._settings.leader_limit
            link = await self._find(deadline, again=True)

    async def close(self, timeout: float) -> None:
        """Send out what was said, then end the connection."""
        self._over = True
        if self._link is not None:
            await self._link.finish(timeout)

    # What the agent says.

    def join(self, candidate: Candidate) -> None:
        """There are no workers here; a place is wanted."""
        self._participant, joined = self._participant.join(candidate)
        self._say(joined)

    def leaving(self, reason: LeaveReason, seconds: float | None = None) -> None:
        """This agent will go, in so many seconds if that is known; its workers may run on for a while."""
        now = asyncio.get_running_loop().time()
        self._participant, leaving = self._participant.leaving(reason, seconds, now)
        self._say(leaving)

    def held(self, round_: int, step: int | None) -> None:
        """The workers of this round can stop at this step, or take no part."""
        self._say(self._participant.held(round_, step))

    def left(self, reason: LeaveReason, *, stopped: bool = False) -> None:
        """There are no workers here, because they `stopped` at the agreed step or otherwise, and this agent goes."""
        self._participant, left = self._participant.left(reason, stopped=stopped)
        self._say(left)

    def worker_failed(self, failure: WorkerFailure) -> None:
        """A worker of the round that runs here failed by itself."""
        self._participant, failed = self._participant.failed(failure)
        self._say(failed)

    def finished(self) -> None:
        """All workers of the round that runs here ended well."""
        self._participant, finished = self._participant.finished()
        self._say(finished)

    def request_leave(self, job: str, reason: LeaveReason, seconds: float | None, detail: str) -> None:
        """Tell all other agents of a job that they have to go; see :class:`~.requests.LeaveRequest`."""
        self._say(LeaveRequest(self._settings.agent, (), job, reason, seconds, detail))

    def close_run(self) -> None:
        """Close the rendezvous for everybody."""
        self._participant, closed = self._participant.closing()
        self._say(closed)

    def _say(self, message: AgentMessage) -> None:
        # What cannot be said now is not lost: every new connection begins with what the leader has to know.
        if self._link is not None:
            self._link.send(message)

    # What the leader says.

    def _heard(self, link: _Link, message: LeaderMessage) -> None:
        if link is not self._link:
            return
        match message:
            case Beat():
                self._say(message)
            case Probed(probe):
                self._say(Ponged(self._settings.agent, probe, self._slowest()))
            case Placed(attempt=attempt, round=round_):
                placed = self._participant.placed(attempt, round_)
                if placed is not None:
                    self._participant = placed
                    self._deliver(message)
            case Holding(round_):
                if self._participant.holding(round_):
                    if self._settings.can_hold:
                        self._deliver(message)
                    else:
                        self.held(round_, None)
            case Stopping(round=round_, step=step):
                stopping = self._participant.stopping(round_, step)
                if stopping is not None:
                    self._participant = stopping
                    self._deliver(message)
            case Interrupted(round=round_):
                if self._participant.interrupted(round_):
                    self._deliver(message)
                elif self._participant.candidate is not None:
                    # The leader gave a place of that round, which was lost on the way.
                    self.join(self._participant.candidate)
            case Ended():
                self._over = True
                self._deliver(message)
            case Waiting() | LeaveRequested():
                self._deliver(message)
            case _:
                pass

    # Finding and keeping.

    def _use(self, link: _Link) -> None:
        self._link = link
        self._participant, greeting = self._participant.greet(asyncio.get_running_loop().time())
        for message in greeting:
            link.send(message)

    async def _watch(self, link: _Link) -> None:
        """Return when this link is broken, after having tried another one beside it if it was merely silent."""
        loop = asyncio.get_running_loop()
        limit = self._settings.heartbeat_limit
        patience = min(limit, self._settings.leader_limit)
        while not link.closed.done():
            # A living leader is heard several times in this time, so an idle agent rarely wakes up for its own clock.
            await asyncio.wait([link.closed], timeout=max(link.heard_at + patience - loop.time(), patience / 3))
            silence = loop.time() - link.heard_at
            if silence > self._settings.leader_limit:
                link.abort()
                self._over = True
                self._deliver(LeaderLost(f"silent for {silence:.1f} s"))
                return
            if silence > limit and not link.closed.done():
                # Either the leader is paused, then this link will go on; or the network was cut, and TCP would take
                # many seconds to notice that it is whole again. The first of two links that answers is kept.
                other = await self._try(link.endpoint)
                if other is not None:
                    link.abort()
                    self._use(other)
                    link = other

    async def _find(self, deadline: float, *, again: bool) -> _Link | None:
        loop = asyncio.get_running_loop()
        pause = _FIRST_PAUSE
        problem = "nobody listens"
        while not self._over:
            try:
                endpoints = await asyncio.to_thread(self._settings.locate)
            except LeaderRefusedError as error:
                self._give_up(Unreachable(str(error), usage=True))
                return None
            for endpoint in endpoints:
                try:
                    return await self._attempt(endpoint)
                except VersionError as error:
                    self._give_up(Unreachable(str(error), usage=True))
                    return None
                except ConnectionRefusedError:
                    # Nobody listens where the leader was. That nobody does at another port of the list means nothing.
                    if again and self._link is not None and endpoint == self._link.endpoint:
                        self._give_up(LeaderLost("its process has ended"))
                        return None
                except ForeignError as error:
                    problem = f"{endpoint[0]}:{endpoint[1]} is {error}"
                except (OSError, SessionError, asyncio.TimeoutError) as error:
                    problem = f"{endpoint[0]}:{endpoint[1]}: {error or 'no answer'}"
            if loop.time() > deadline:
                self._give_up(LeaderLost(problem) if again else Unreachable(problem))
                return None
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        return None

    def _give_up(self, word: LeaderLost | Unreachable) -> None:
        self._over = True
        self._deliver(word)

    async def _try(self, endpoint: tuple[str, int]) -> _Link | None:
        try:
            return await self._attempt(endpoint)
        except (OSError, SessionError, asyncio.TimeoutError):
            return None

    async def _attempt(self, endpoint: tuple[str, int]) -> _Link:
        loop = asyncio.get_running_loop()
        session = Session(Role.AGENT, self._settings.secret, self._settings.run, agent=self._settings.agent)
        host, port = endpoint
        link = _Link(endpoint, session, self._heard)
        await asyncio.wait_for(loop.create_connection(lambda: link, host, port), _ATTEMPT_TIMEOUT)
        try:
            await asyncio.wait_for(asyncio.shield(link.established), _ATTEMPT_TIMEOUT)
        except BaseException:
            link.abort()
            raise
        return link


class _Link(asyncio.Protocol):
    """One connection to what should be the leader."""

    def __init__(
        self, endpoint: tuple[str, int], session: Session, heard: Callable[[_Link, LeaderMessage], None]
    ) -> None:
        loop = asyncio.get_running_loop()
        self.endpoint = endpoint
        self.heard_at = loop.time()
        self.established: asyncio.Future[None] = loop.create_future()
        self.closed: asyncio.Future[None] = loop.create_future()
        self._session = session
        self._heard = heard
        self._loop = loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        self._transport = cast(asyncio.Transport, transport)
        stream = transport.get_extra_info("socket")
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._transport.write(self._session.start())

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        self.heard_at = self._loop.time()
        try:
            messages, answer = self._session.receive(data)
        except SessionError as error:
            self._fail(error)
            self._transport.abort()
            return
        if answer:
            self._transport.write(answer)
        if self._session.established and not self.established.done():
            self.established.set_result(None)
        for content in messages:
            self._receive(content)

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._fail(ForeignError("something that closes the connection"))
        if not self.closed.done():
            self.closed.set_result(None)

    def send(self, message: AgentMessage) -> None:
        """Send one message, if the connection still stands."""
        if not self._transport.is_closing():
            self._transport.write(self._session.seal(encode(message)))

    def abort(self) -> None:
        """End the connection at once."""
        with contextlib.suppress(AttributeError):
            self._transport.abort()

    async def finish(self, timeout: float) -> None:
        """Send out what is buffered and end the connection."""
        self._transport.close()
        await asyncio.wait([self.closed], timeout=timeout)

    def _receive(self, content: dict[str, Any]) -> None:
        try:
            message = decode_leader_message(content)
        except MessageError as error:
            logger.warning("dropped %s", error)
            return
        self._heard(self, message)

    def _fail(self, error: SessionError) -> None:
        if not self.established.done():
            self.established.set_exception(error)
            self.established.exception()  # asked for once, so that an attempt given up leaves no warning behind
