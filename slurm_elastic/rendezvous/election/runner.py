"""Carries out the actions of the election machine, in an asyncio loop, and feeds it what comes of them.

The leader runs here, too, if this agent ever leads.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
from collections import deque
from collections.abc import Callable, Coroutine

from slurm_elastic.errors import RecordsError, SlurmElasticError
from slurm_elastic.rendezvous.election import events, machine
from slurm_elastic.rendezvous.election.campaign import Campaign, CampaignRecords, ElectionConfig, locate
from slurm_elastic.rendezvous.election.due import address
from slurm_elastic.rendezvous.election.leader_location import Answer, LeaderLocation
from slurm_elastic.rendezvous.election.state import FOUNDER, initial_election
from slurm_elastic.rendezvous.leader.leader import FencedError, Leader
from slurm_elastic.rendezvous.membership.events import Ponged
from slurm_elastic.rendezvous.membership.stragglers import WorkerPosition
from slurm_elastic.rendezvous.records.api import Records
from slurm_elastic.rendezvous.run_in_thread import run_in_thread
from slurm_elastic.rendezvous.transport import messages
from slurm_elastic.rendezvous.transport.connection import Link, open_link
from slurm_elastic.rendezvous.transport.listener import Listener
from slurm_elastic.rendezvous.transport.session import (
    BusyError,
    ClosedError,
    ForeignError,
    Role,
    Session,
    SessionError,
    TwinError,
    VersionError,
)

logger = logging.getLogger(__name__)

Deliver = Callable[[events.LeaderEvent], None]
Positions = Callable[[bool], tuple[WorkerPosition, ...]]
"""Returns how far the workers here are, when the leader asks; its argument is True if they have to write dumps, too."""


class Runner:
    """One agent's part in the election. All methods are called in the loop's thread unless they say otherwise.

    Args:
        founder: The first term of the run, if this agent has claimed it.
        report: Returns what this agent does now as JSON, when the leader asks.

    Attributes:
        leader: The leader that runs here, with a term of its own or without one yet; None while none does.
        newest: The same, also after its end.
    """

    def __init__(
        self,
        config: ElectionConfig,
        secret: bytes,
        records: Records,
        listening: socket.socket,
        make_leader: Callable[[Campaign], Leader],
        founder: Campaign | None,
        deliver: Deliver,
        positions: Positions,
        report: Callable[[], str],
    ) -> None:
        self._config, self._secret, self._records = config, secret, records
        self._listening, self._make_leader, self._founder = listening, make_leader, founder
        self._deliver, self._positions, self._report = deliver, positions, report
        self._loop = asyncio.get_running_loop()
        self._election = initial_election(config, self._loop.time(), founder=founder is not None)
        self._events: deque[events.Event] = deque()
        self._busy = False
        self._timer: asyncio.TimerHandle | None = None
        self._links: dict[int, Link] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._failed = False
        self._serving: asyncio.Task[None] | None = None
        self.leader: Leader | None = None
        self.newest: Leader | None = None

    async def open(self) -> None:
        """Search for the leader and follow it, or lead, until the run has ended or :meth:`close` is called."""
        config = self._config
        self._listener = Listener(
            self._listening,
            lambda: Session(Role.LEADER, self._secret, config.incarnation, refuses=lambda agent, nonce: 0.0),
        )
        if self._founder is not None:
            self._lead(FOUNDER, self._founder)
            # From here on the leader listens.
            await asyncio.sleep(0)
        self.handle(events.Tick())

    def leader_address(self) -> str:
        """Address or name at which the leader was found last, empty before; from any thread."""
        election = self._election
        endpoint = election.link.endpoint if election.link is not None else election.search.lost
        return endpoint[0] if endpoint is not None else ""

    def known_members(self) -> tuple[messages.Successor, ...]:
        """Members of the round of the last assignment here, as far as this agent was told; from any thread.

        Its leader is among them, and the first of those that may follow it; all of a small round.
        """
        members = self._election.known
        leader = (messages.Successor(members.leader, *members.endpoint),) if members.endpoint is not None else ()
        return (*leader, *members.successors)

    def leads(self) -> bool:
        """Return whether a leader runs here whose term is its own."""
        return self.leader is not None and self.leader.membership.claimed

    async def close(self, timeout: float) -> None:
        """Send out what is queued, then end the link, and the leader here when its agents have gone.

        Either takes at most `timeout` seconds.
        """
        self.handle(events.Stop())
        for task in [*self._tasks.values()]:
            task.cancel()
        link = self._election.link
        if link is not None and link.number in self._links:
            await self._links[link.number].finish(timeout)
        if self._timer is not None:
            self._timer.cancel()
        leader, serving = self.leader, self._serving
        if leader is not None and serving is not None:
            all_left = asyncio.create_task(leader.wait_until_all_left())
            await asyncio.wait([all_left, serving], timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            all_left.cancel()
            serving.cancel()
            await asyncio.gather(all_left, serving, return_exceptions=True)
        self._listener.close()

    def handle(self, event: events.Event) -> None:
        """Let the machine process an event, and carry out its actions."""
        self._events.append(event)
        if self._busy:
            return
        self._busy = True
        try:
            while self._events:
                self._election, actions = machine.step(self._election, self._events.popleft(), self._loop.time())
                for action in actions:
                    self._act(action)
        except Exception as error:
            self._fail(error)
        finally:
            self._busy = False
        self._schedule()

    def _fail(self, error: BaseException) -> None:
        """End this agent's part after a fault in here."""
        if self._failed:
            raise error
        self._failed = True
        logger.error("the link to the leader failed", exc_info=error)
        self._deliver(events.LeaderLost(f"the link to it failed: {error}"))

    def _schedule(self) -> None:
        deadline = self._election.deadline
        if self._timer is not None:
            if not self._timer.cancelled() and self._timer.when() <= deadline:
                return
            self._timer.cancel()
            self._timer = None
        if deadline != math.inf:
            self._timer = self._loop.call_at(deadline, self._wake)

    def _wake(self) -> None:
        self._timer = None
        if self._loop.time() >= self._election.deadline:
            self.handle(events.Tick())
        else:
            self._schedule()

    # Actions.

    def _act(self, action: events.Action) -> None:
        match action:
            case events.Send(number, message):
                self._send(number, message)
            case events.AnswerProbe(number, probe, dumps):
                self._start(number, self._answer_probe(number, probe, dumps))
            case events.Connect(number, endpoint, timeout):
                self._start(number, self._connect(number, endpoint, timeout))
            case events.CloseLink(number):
                if number in self._links:
                    self._links.pop(number).abort()
                elif number in self._tasks:
                    self._tasks.pop(number).cancel()
            case events.ReadLeaderLocation(number, location):
                self._start(number, self._read_leader_location(number, location))
            case events.ReadCampaignRecords(number):
                self._start(number, self._read_campaign_records(number))
            case events.Lead(number, campaign):
                self._lead(number, campaign)
            case events.StopLeading():
                if self._serving is not None:
                    self._serving.cancel()
            case events.Deliver(event):
                self._deliver(event)
            case events.Warn(line):
                logger.warning("%s", line)

    async def _answer_probe(self, number: int, probe: int, dumps: bool) -> None:
        # Workers that write dumps have some time to say where they are, and no heartbeat waits for that.
        positions = await self._loop.run_in_executor(None, self._positions, dumps)
        self._send(number, Ponged(self._config.agent, probe, positions))

    def _send(self, number: int, message: messages.AgentMessage) -> None:
        if number in self._links:
            self._links[number].send(messages.encode(message))

    def _start(self, number: int, work: Coroutine[None, None, None]) -> None:
        def ended(task: asyncio.Task[None]) -> None:
            if self._tasks.get(number) is task:
                del self._tasks[number]
            if not task.cancelled() and (error := task.exception()) is not None:
                self._fail(error)

        task = self._tasks[number] = self._loop.create_task(work)
        task.add_done_callback(ended)

    async def _connect(self, number: int, endpoint: messages.Endpoint, timeout: float | None) -> None:
        config = self._config
        session = Session(Role.AGENT, self._secret, config.incarnation, agent=config.agent)

        def on_message(link: Link, message: messages.LeaderMessage) -> None:
            if isinstance(message, messages.StatusRequested):
                # It concerns no election, and changes nothing.
                link.send(messages.encode(messages.StatusReport(config.agent, message.request, self._report())))
            else:
                self.handle(events.Received(number, message))

        try:
            link = await asyncio.wait_for(open_link(endpoint, session, on_message), timeout)
        except (OSError, SessionError, asyncio.TimeoutError) as error:
            self.handle(_failed(number, endpoint, error))
            return
        self._links[number] = link
        self.handle(events.LinkOpened(number, link.endpoint, session.epoch))
        link.closed.add_done_callback(lambda _: self._closed(number))

    def _closed(self, number: int) -> None:
        if self._links.pop(number, None) is not None:
            self.handle(events.LinkClosed(number))

    async def _read_leader_location(self, number: int, location: LeaderLocation) -> None:
        self.handle(events.LeaderLocationRead(number, await run_in_thread(lambda: self._locate(location))))

    def _locate(self, location: LeaderLocation) -> LeaderLocation:
        with contextlib.suppress(RecordsError, ValueError, KeyError, TypeError):
            return locate(self._config, self._records.situation(location.round), location)
        return LeaderLocation(self._config.expected)

    async def _read_campaign_records(self, number: int) -> None:
        seen, problem = None, ""
        try:
            seen = await run_in_thread(
                lambda: CampaignRecords(self._records.newest_epoch() or 0, self._records.situation())
            )
        except (SlurmElasticError, LookupError, ValueError, TypeError) as error:
            problem = str(error)
        self.handle(events.CampaignRecordsRead(number, seen, problem))

    # The leader here.

    def _lead(self, number: int, campaign: Campaign) -> None:
        """Lead without a term until there is a quorum."""
        leader = self._make_leader(campaign)
        before, self.leader, self.newest = self._serving, leader, leader
        leader.on_claim = lambda: self.handle(events.LeaderClaimed(number))
        self._serving = self._loop.create_task(self._serve(number, leader, before))

    async def _serve(self, number: int, leader: Leader, before: asyncio.Task[None] | None) -> None:
        problem = ""
        try:
            if before is not None:
                await asyncio.gather(before, return_exceptions=True)
            await leader.serve(self._listener)
        except FencedError as error:
            # A candidate whose term another agent has taken has had no follower.
            if leader.membership.claimed:
                logger.info("this agent leads no more: %s", error)
        except SlurmElasticError as error:
            # Such as a full disk: something for a person to fix, and no fault in here.
            problem = str(error)
        except Exception as error:
            logger.exception("the leader failed")
            problem = f"it failed: {error}"
        finally:
            if self.leader is leader:
                self.leader = None
        self.handle(events.LeaderEnded(number, problem))


_ANSWERS: dict[type[Exception], Answer] = {
    ConnectionRefusedError: Answer.ENDED,
    ClosedError: Answer.IDLE,
    TwinError: Answer.TWIN,
    VersionError: Answer.VERSION,
}


def _failed(number: int, endpoint: messages.Endpoint, error: Exception) -> events.LinkFailed:
    """Return what it says about the other side that an attempt to connect failed like this."""
    answer = _ANSWERS.get(type(error), Answer.SILENT)
    match error:
        case VersionError():
            problem = str(error)
        case ConnectionRefusedError():
            problem = answer.value
        case BusyError() | ForeignError():
            problem = f"{address(endpoint)} is {error}"
        case _:
            problem = f"{address(endpoint)}: {error or answer.value}"
    return events.LinkFailed(number, answer, problem, error.seconds if isinstance(error, BusyError) else 0.0)
