"""An agent's end of the membership protocol: what it says to the leader and hears from it, on one link after another.

Runs in an asyncio loop. What the leader says that concerns this agent is handed to `deliver`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from slurm_elastic.rendezvous.election.finder import Finder
from slurm_elastic.rendezvous.election.follower import Participant
from slurm_elastic.rendezvous.election.leader_info import Leadership, MemberSettings
from slurm_elastic.rendezvous.election.policy import FENCE, Successor
from slurm_elastic.rendezvous.leader_events import CutOff, Word
from slurm_elastic.rendezvous.leave_requests import LeaveRequest, LeaveRequested
from slurm_elastic.rendezvous.membership import Candidate, LeaveReason, Ponged, Reason, Slowest, WorkerFailure
from slurm_elastic.rendezvous.transport.client_connection import Link, open_link
from slurm_elastic.rendezvous.transport.connect import Endpoint
from slurm_elastic.rendezvous.transport.messages import (
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
from slurm_elastic.rendezvous.transport.session import Role, Session, SessionError

__all__ = ["Member"]

_LATE = 1 / 6
"""Of the heartbeat limit: an agent that comes to look at its clock so much too late stood still."""


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
        self._participant = Participant(settings.agent, coming=settings.coming)
        self._link: Link | None = None
        self._over = False
        self._known = Leadership()
        self._finder = Finder(settings, self._known, self._connect, self._fence)

    async def run(self) -> None:
        """Connect and stay connected until the run has ended or :meth:`close` was called."""
        while not self._over:
            found = await self._finder.find(self._link)
            if found is None:
                return
            if not isinstance(found, Link):
                self._over = True
                self._deliver(found)
                return
            self._use(found)
            await self._watch(found)

    def leader_address(self) -> str:
        """Address or name at which the leader was found last, empty before; from any thread."""
        link = self._link
        return link.endpoint[0] if link is not None else ""

    def members_told(self) -> tuple[Successor, ...]:
        """Members of the round in which this agent had its last place, as far as it was told; from any thread.

        Its leader is among them, and the first of those that may follow it; all of a small round.
        """
        known = self._known
        leader = (Successor(known.leader, *known.place),) if known.place is not None else ()
        return (*leader, *known.successors)

    async def close(self, timeout: float) -> None:
        """Send out what was said, then end the connection."""
        self._over = True
        self._finder.close()
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
        self._known.leaves((self._settings.agent,))
        self._say(leaving)

    def held(self, round_: int, step: int | None) -> None:
        """The workers of this round can stop at this step, or take no part."""
        self._say(self._participant.held(round_, step))

    def left(self, reason: LeaveReason, *, stopped: bool = False) -> None:
        """There are no workers here, because they `stopped` at the agreed step or otherwise, and this agent goes."""
        self._participant, left = self._participant.left(reason, stopped=stopped)
        self._known.leaves((self._settings.agent,))
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
            case Placed(attempt=attempt, round=round_, restarts=restarts):
                self._participant = self._participant.charged(restarts)
                placed = self._participant.placed(attempt, round_)
                if placed is not None:
                    self._participant = placed
                    self._known.placed(message, link.endpoint)
                    self._deliver(message)
            case Resigned(agent, gone):
                self._known.resigns(agent, gone, link.endpoint)
            case Holding(round_, leaving):
                self._known.leaves(leaving)
                if self._participant.holding(round_):
                    if self._settings.can_hold:
                        self._deliver(message)
                    else:
                        self.held(round_, None)
            case Stopping(round=round_, step=step, leaving=leaving):
                self._known.leaves(leaving)
                stopping = self._participant.stopping(round_, step)
                if stopping is not None:
                    self._participant = stopping
                    self._deliver(message)
            case Interrupted(round=round_, restarts=restarts):
                self._participant = self._participant.charged(restarts)
                if self._participant.interrupted(round_):
                    self._participant = self._participant.told_over()
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

    # Keeping the link.

    def _use(self, link: Link) -> None:
        self._link = link
        self._participant, greeting = self._participant.greet(asyncio.get_running_loop().time())
        for message in greeting:
            link.send(message)

    def _fence(self, why: str) -> None:
        """Stop the workers here: the leader gives up this agent about now, and goes on without it."""
        cut_off = self._participant.unheard()
        if cut_off is not None and cut_off.last_round is not None:
            self._participant = cut_off
            self._deliver(CutOff(cut_off.last_round, Reason.NODE_LOST, self._known.node, why))

    async def _watch(self, link: Link) -> None:
        """Return when this link is broken, or its leader lost.

        While the leader is merely silent another link is tried beside it: either the leader is paused, then this one
        will go on; or the network was cut, and TCP would take many seconds to notice that it is whole again. The first
        of two links that answers is kept.

        An agent that stood still itself cannot tell whether the leader did, too, as when a whole job is suspended and
        goes on node by node: to it the leader has only just become silent.
        """
        loop = asyncio.get_running_loop()
        limit = self._settings.heartbeat_limit
        suspicious = limit / 2
        looks_by, forgiven = loop.time(), -math.inf
        while not link.closed.done():
            if loop.time() < link.heard_at + suspicious:
                await link.silent(suspicious)
            else:
                await asyncio.wait([link.closed], timeout=limit / 20)
            now = loop.time()
            if now > max(looks_by, link.heard_at + suspicious) + limit * _LATE and link.heard_at != forgiven:
                # Once: whoever is always late has to find out some time that nobody leads.
                link.heard_at = forgiven = now - suspicious
            looks_by = now + limit * (1 / 20 + 1 / 10)
            silence = now - link.heard_at
            if link.closed.done() or silence < suspicious:
                continue
            if silence > self._settings.leader_limit:
                link.abort()
                return
            if silence >= limit * FENCE:
                self._fence("the leader is silent")
            other = await self._try(link.endpoint, limit / 10)
            if other is not None:
                # The leader has ended the older one for it, which may be known here already.
                link.abort()
                self._use(other)
                link = other

    async def _try(self, endpoint: Endpoint, timeout: float) -> Link | None:
        try:
            return await asyncio.wait_for(self._connect(endpoint), timeout)
        except (OSError, SessionError, asyncio.TimeoutError):
            return None

    async def _connect(self, endpoint: Endpoint) -> Link:
        session = Session(Role.AGENT, self._settings.secret, self._settings.run, agent=self._settings.agent)
        return await open_link(endpoint, session, self._heard, self._known.epoch)
