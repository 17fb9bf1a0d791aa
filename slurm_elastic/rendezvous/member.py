"""An agent's link to the leader: find it, prove who one is, speak and listen, and connect again when it breaks.

Runs in an asyncio loop. What the leader says that concerns this agent is handed to `deliver`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass

from slurm_elastic.rendezvous.link import Endpoint, Link
from slurm_elastic.rendezvous.membership import Candidate, LeaveReason, Ponged, Reason, Slowest, WorkerFailure
from slurm_elastic.rendezvous.messages import (
    AgentMessage,
    Beat,
    Ended,
    Holding,
    Interrupted,
    LeaderMessage,
    Placed,
    Probed,
    Resigned,
    Stopping,
    Waiting,
)
from slurm_elastic.rendezvous.participant import Participant
from slurm_elastic.rendezvous.requests import LeaveRequest, LeaveRequested
from slurm_elastic.rendezvous.search import Answer, Search
from slurm_elastic.rendezvous.session import ForeignError, Role, Session, SessionError, VersionError
from slurm_elastic.rendezvous.succession import FENCE, Successor, patience

__all__ = ["LeaderLost", "LeaderRefusedError", "Member", "MemberSettings", "Unreachable", "Whereabouts", "Word"]

logger = logging.getLogger(__name__)

_ATTEMPT_TIMEOUT = 3.0
_READ_AGAIN = 0.5
"""Seconds between two looks at the records while no leader is found."""
_RESTORE = 0.1
"""Seconds in which a broken link may be restored; as long as a leader waits for it."""
_STAND_BACK = 3.0
"""Seconds in which an agent does not stand up again after it found somebody else."""
_UNLED = 10.0
"""Seconds after which a run that nobody has ever led is led by whoever is there."""


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
class Whereabouts:
    """Where a leader may be.

    Attributes:
        places: in the order in which to try.
        published: whether a leader has said so, and not just where one is expected.
        successors: the members of the last round on record, by rank.
    """

    places: tuple[Endpoint, ...] = ()
    published: bool = False
    successors: tuple[Successor, ...] = ()


@dataclass(frozen=True, slots=True)
class MemberSettings:
    """How to find and keep the leader.

    Attributes:
        run: run id and incarnation.
        secret: the run's secret.
        agent: own identity.
        locate: says where the leader may be; may block, and is asked again while nobody is found. Raises
            LeaderRefusedError if there will be none.
        own: where this very agent leads or stands, None while it does not.
        addresses: all places that are this very agent.
        stand: stands up to lead, told which agents are gone for certain, and why the last leader is followed; returns
            whether that worked. None for an agent that never leads.
        standing: whether this agent stands without having taken an epoch yet.
        stand_down: ends that.
        can_hold: whether the workers here can be asked for a step to stop at.
        connect_timeout: seconds until a leader must be found.
        heartbeat_limit: seconds of silence after which the leader gives up an agent.
        leader_limit: seconds of silence after which the leader is lost.
    """

    run: str
    secret: bytes
    agent: str
    locate: Callable[[], Whereabouts]
    own: Callable[[], Endpoint | None] = lambda: None
    addresses: Callable[[], Collection[Endpoint]] = lambda: ()
    stand: Callable[[frozenset[str], Reason], Awaitable[bool]] | None = None
    standing: Callable[[], bool] | None = None
    stand_down: Callable[[], Awaitable[None]] | None = None
    can_hold: bool = False
    connect_timeout: float = 600.0
    heartbeat_limit: float = 3.0
    leader_limit: float = 4.25


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
        self._link: Link | None = None
        self._over = False
        # What is known of who leads, and who may next.
        self._epoch = 0
        self._leader = self._leader_node = ""
        self._successors: tuple[Successor, ...] = ()
        self._resigned = False
        self._left: Endpoint | None = None
        self._fenced: int | None = None
        self._stand_again_at = 0.0
        self._rivals: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Connect and stay connected until the run has ended or :meth:`close` was called."""
        link = await self._find(again=False)
        while link is not None:
            self._use(link)
            await self._watch(link)
            if self._over:
                return
            link = await self._find(again=True)

    def leader_address(self) -> str:
        """Address or name at which the leader was found last, empty before; from any thread."""
        link = self._link
        return link.endpoint[0] if link is not None else ""

    async def close(self, timeout: float) -> None:
        """Send out what was said, then end the connection."""
        self._over = True
        if self._rivals is not None:
            self._rivals.cancel()
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

    def _heard(self, link: Link, message: LeaderMessage) -> None:
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
                    self._epoch, self._leader, self._leader_node = message.epoch, message.leader, message.leader_node
                    self._successors = message.successors
                    self._deliver(message)
            case Resigned(agent):
                self._resigned = True
                self._leader = agent
                self._left = link.endpoint
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

    def _use(self, link: Link) -> None:
        self._link = link
        self._participant, greeting = self._participant.greet(asyncio.get_running_loop().time())
        for message in greeting:
            link.send(message)

    def _fence(self, why: str) -> None:
        """Stop the workers here: the leader gives up this agent about now, and goes on without it."""
        round_ = self._participant.last_round
        if self._participant.running and round_ is not None and self._fenced != round_:
            self._fenced = round_
            self._deliver(Interrupted(round_, Reason.NODE_LOST, self._leader_node, why))

    async def _watch(self, link: Link) -> None:
        """Return when this link is broken, or its leader lost.

        While the leader is merely silent another link is tried beside it: either the leader is paused, then this one
        will go on; or the network was cut, and TCP would take many seconds to notice that it is whole again. The first
        of two links that answers is kept.
        """
        loop = asyncio.get_running_loop()
        limit = self._settings.heartbeat_limit
        suspicious = limit / 2
        while not link.closed.done():
            # A living leader is heard several times in this time, so an idle agent rarely wakes up for its own clock.
            await asyncio.wait([link.closed], timeout=max(link.heard_at + suspicious - loop.time(), limit / 20))
            silence = loop.time() - link.heard_at
            if link.closed.done() or silence < suspicious:
                continue
            if silence > self._settings.leader_limit:
                link.abort()
                return
            if silence >= limit * FENCE:
                self._fence("the leader is silent")
            other = await self._try(link.endpoint, limit / 10)
            if other is not None and not link.closed.done():
                link.abort()
                self._use(other)
                link = other

    async def _find(self, *, again: bool) -> Link | None:
        """Look for a leader until there is one, be it this agent; None if there will be none."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        deadline = began + self._settings.connect_timeout
        search = Search(self._attempt)
        seen = Whereabouts()
        reading: asyncio.Future[Whereabouts] | None = None
        read_at = 0.0
        lost_at = began if self._resigned else None
        while not self._over:
            now = loop.time()
            if reading is None and now >= read_at:
                reading = asyncio.ensure_future(asyncio.to_thread(self._settings.locate))
            if reading is not None and not seen.places:
                # At first there is nothing to do but to read; later on a slow file system holds up nothing.
                await asyncio.wait([reading], timeout=_RESTORE)
            if reading is not None and reading.done():
                try:
                    seen = reading.result()
                except LeaderRefusedError as error:
                    self._give_up(Unreachable(str(error), usage=True))
                    break
                reading, read_at = None, now + _READ_AGAIN
            old = self._link.endpoint if again and self._link is not None else None
            if again and now >= began + _RESTORE:
                self._fence("the link to the leader is broken")
            order = self._successors or seen.successors
            ended = {place for place, answer in search.answers.items() if answer is Answer.ENDED}
            idle = {place for place, answer in search.answers.items() if answer is Answer.IDLE}
            if lost_at is None:
                lost_at = self._lost_at(again, began, old, seen, ended | idle)
            try:
                link = await search.look(self._places(old, seen, order, lost_at is not None or now > began + _RESTORE))
            except VersionError as error:
                self._give_up(Unreachable(str(error), usage=True))
                break
            if link is not None:
                await search.close()
                self._resigned = False
                return link
            gone = {each.agent for each in order if (each.address, each.port) in ended}
            names = [each.agent for each in order]
            if lost_at is not None and now >= lost_at + patience(names, self._settings.agent, gone):
                if old in ended or self._resigned:
                    gone.add(self._leader)
                await self._stand(frozenset(gone), now)
            if now > deadline:
                self._give_up(LeaderLost(search.problem) if again else Unreachable(search.problem))
        await search.close()
        return None

    def _lost_at(
        self, again: bool, began: float, old: Endpoint | None, seen: Whereabouts, ended: Collection[Endpoint]
    ) -> float | None:
        """Since when it is certain that there is no leader where there was one; None as long as it is not."""
        now = asyncio.get_running_loop().time()
        if again and self._link is not None:
            silent = now > self._link.heard_at + self._settings.leader_limit
            return now if old in ended or silent else None
        if not seen.published:
            return now if self._settings.stand is not None and now > began + _UNLED else None
        gone = all(place in ended for place in seen.places)
        return now if gone or now > began + self._settings.leader_limit else None

    def _places(
        self, old: Endpoint | None, seen: Whereabouts, order: Sequence[Successor], lost: bool
    ) -> list[Endpoint]:
        own = self._settings.own()
        if own is not None:
            return [own]
        places = [place for place in seen.places if place != self._left]
        if old is not None and old != self._left:
            places.insert(0, old)
        if lost:
            places += [(each.address, each.port) for each in order if each.agent != self._settings.agent]
        return places

    async def _stand(self, gone: frozenset[str], now: float) -> None:
        stand = self._settings.stand
        if stand is None or now < self._stand_again_at:
            return
        self._stand_again_at = now + 1.0
        reason = Reason.NODE_LEFT if self._resigned else Reason.NODE_LOST
        if await stand(gone, reason):
            self._rivals = asyncio.create_task(self._look_for_rivals())

    async def _look_for_rivals(self) -> None:
        """While this agent stands without an epoch of its own, find out whether somebody else leads, or should."""
        search = Search(self._attempt)
        try:
            while (standing := self._settings.standing) is not None and standing():
                seen = await asyncio.to_thread(self._settings.locate)
                order = self._successors or seen.successors
                names = [each.agent for each in order]
                own = self._settings.agent
                ahead = order[: names.index(own)] if own in names else order
                places = [*seen.places, *((each.address, each.port) for each in ahead)]
                until = asyncio.get_running_loop().time() + _READ_AGAIN
                while standing() and asyncio.get_running_loop().time() < until:
                    others = {self._left, *self._settings.addresses()}
                    link = await search.look(place for place in places if place not in others)
                    if link is not None:
                        link.abort()
                        # Time to get there before this agent thinks of itself again.
                        self._stand_again_at = asyncio.get_running_loop().time() + _STAND_BACK
                        if self._settings.stand_down is not None and standing():
                            await self._settings.stand_down()
                        return
        except (SessionError, LeaderRefusedError):
            logger.debug("looking for another leader ended", exc_info=True)
        finally:
            await search.close()

    def _give_up(self, word: LeaderLost | Unreachable) -> None:
        self._over = True
        self._deliver(word)

    async def _try(self, endpoint: Endpoint, timeout: float) -> Link | None:
        try:
            return await asyncio.wait_for(self._attempt(endpoint), timeout)
        except (OSError, SessionError, asyncio.TimeoutError):
            return None

    async def _attempt(self, endpoint: Endpoint) -> Link:
        loop = asyncio.get_running_loop()
        session = Session(Role.AGENT, self._settings.secret, self._settings.run, agent=self._settings.agent)
        host, port = endpoint
        link = Link(endpoint, session, self._heard)
        try:
            await asyncio.wait_for(loop.create_connection(lambda: link, host, port), _ATTEMPT_TIMEOUT)
            await asyncio.wait_for(asyncio.shield(link.established), _ATTEMPT_TIMEOUT)
            if link.epoch < self._epoch:
                raise ForeignError("a leader that has been followed by another")
        except BaseException:
            link.abort()
            raise
        return link
