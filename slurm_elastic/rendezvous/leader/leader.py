"""The leader: passes the messages of agents to the machine of its term, and carries out the machine's actions.

Everything runs in one asyncio loop, but for calls that may block, as of the records: those run in threads.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from itertools import islice

from slurm_elastic.errors import RecordsError
from slurm_elastic.rendezvous.election import term
from slurm_elastic.rendezvous.election.campaign import Campaign
from slurm_elastic.rendezvous.leader.absent_agents import agents_ended, agents_gone, nodes_down, note_releases
from slurm_elastic.rendezvous.leader.agent_connections import AcceptedConnection, AgentConnections
from slurm_elastic.rendezvous.leader.fenced_records import FencedRecords
from slurm_elastic.rendezvous.leader.status_collector import StatusCollector
from slurm_elastic.rendezvous.membership import events
from slurm_elastic.rendezvous.membership.agents import node_of
from slurm_elastic.rendezvous.membership.assignment import Place, Table
from slurm_elastic.rendezvous.membership.state import Phase, State
from slurm_elastic.rendezvous.run_in_thread import run_in_thread
from slurm_elastic.rendezvous.transport import messages
from slurm_elastic.rendezvous.transport.listener import Listener
from slurm_elastic.rendezvous.transport.session import Role, Session
from slurm_elastic.slurm import Controller, compress

logger = logging.getLogger("slurm_elastic")

_PROBED_AT_ONCE = 64
"""Agents that the leader probes together: each probe takes a descriptor."""


class FencedError(Exception):
    """Another agent leads this run with a newer epoch, or this agent has stepped down."""


class Leader:
    """One leader's term.

    Args:
        journal: Called with each decision after the leader has carried it out.
        controller: Asked, in threads, about nodes and members that are missing.
    """

    def __init__(
        self,
        run: str,
        secret: bytes,
        campaign: Campaign,
        fenced_records: FencedRecords,
        journal: Callable[[events.Decision], None],
        controller: Controller,
    ) -> None:
        self.run, self.secret, self.epoch = run, secret, campaign.term
        self._settings = campaign.settings
        self._fenced_records = fenced_records
        self._journal = journal
        self._controller = controller
        self._endpoints = dict(campaign.endpoints)
        self.connections = AgentConnections()
        self._signs: dict[str, float] = {}
        self._releases: dict[str, str] = {}
        self._status = StatusCollector(self.connections, self._agent_nodes, self._summary)
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.on_claim: Callable[[], None] = lambda: None
        """Called when the epoch is claimed."""
        # Its times begin when it serves.
        self._term = term.initial_term(self.epoch, self._settings, 0.0)

    @property
    def membership(self) -> State:
        """The state of the membership."""
        return self._term.membership

    async def serve(self, listener: Listener) -> None:
        """Lead until the call is cancelled, or this leader has resigned.

        Raises:
            FencedError: Another agent leads this run.
            RecordsError: A record cannot be written or read.
        """
        self._loop = asyncio.get_running_loop()
        self._term = term.initial_term(self.epoch, self._settings, self._loop.time())
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._listener, connections = listener, self.connections
        serve = functools.partial(AcceptedConnection, self)
        listener.admit(self._new_session, serve, connections.reject, connections.room)
        self._schedule()
        try:
            # A leader that waits for no member claims its term at once.
            self._handle(events.Tick())
            await self._ended
        finally:
            listener.turn_away()
            if self._timer is not None:
                self._timer.cancel()
            connections.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def wait_until_all_left(self) -> None:
        """Return when every decision is carried out and every agent has disconnected."""
        while self.connections.by_agent or self._term.queue:
            await asyncio.sleep(0.02)

    # What the connections report.

    def _new_session(self) -> Session:
        return Session(Role.LEADER, self.secret, self.run, epoch=self.epoch, refuses=self.connections.refuses)

    def opened(self, connection: AcceptedConnection) -> None:
        """A member of the run has connected, and has not proved yet which agent it is."""
        self.connections.opened(connection)
        if connection.named in self.membership.broken:
            self._handle(events.Returning(connection.named))

    def closed(self, connection: AcceptedConnection) -> None:
        """The connection has ended."""
        if self.connections.closed(connection) or (not connection.agent and not self.connections.has(connection.named)):
            # The latter was about to connect again, and has not proved its identity.
            self._handle(events.Disconnected(connection.named))

    def received(self, connection: AcceptedConnection, content: dict[str, object]) -> None:
        """An agent has sent a message."""
        if not self.connections.current(connection):
            return
        self._signs[connection.agent] = self._loop.time()
        try:
            message = messages.decode_agent_message(content, connection.agent)
        except messages.MessageError as error:
            self.connections.reject(connection.peer, str(error))
            return
        if isinstance(message, events.Joined):
            candidate = message.candidate
            self._endpoints[candidate.agent] = (candidate.address, candidate.standby_port)
            difference = note_releases(self._releases, candidate.node, candidate.releases)
            if difference:
                logger.warning("%s", difference)
        if isinstance(message, messages.LeaveRequest):
            self._pass_on(connection, message)
        elif isinstance(message, messages.StatusRequest):
            self._start(self._status.ask(message.agent))
        elif isinstance(message, messages.StatusReport):
            self._status.reported(message)
        elif not isinstance(message, messages.Heartbeat):
            self._handle(message)

    def _pass_on(self, connection: AcceptedConnection, request: messages.LeaveRequest) -> None:
        meant, answer = messages.addressed_agents(
            request, self._agent_nodes() if self.membership.phase is not Phase.CLOSED else {}
        )
        self.connections.send(meant, messages.LeaveRequested(request.reason, request.seconds, request.detail))
        self.connections.send((connection.agent,), answer)

    def _agent_nodes(self) -> dict[str, str]:
        return {name: agent.candidate.node for name, agent in self.membership.agents.items()}

    def _summary(self) -> messages.StatusAnswer:
        state = self.membership
        since = state.published_at if state.phase is Phase.RUNNING else state.forming_since
        return messages.StatusAnswer(
            leader=self._settings.agent,
            epoch=self.epoch,
            phase=state.phase.value,
            seconds=round(max(0.0, self._loop.time() - since), 3),
            min_nodes=self._settings.min_nodes,
            max_nodes=self._settings.max_nodes,
        )

    # The machine.

    def _handle(self, event: term.TermEvent) -> None:
        if self._ended.done():
            # The connections that it closes at its end tell of it later, and nothing may start then.
            return
        self._term, actions = term.step(self._term, event, self._loop.time())
        for action in actions:
            self._act(action)
        self._schedule()

    def _schedule(self) -> None:
        deadline = min(self._term.deadline, self.connections.beat_at)
        if self._timer is not None:
            if not self._timer.cancelled() and self._timer.when() <= deadline:
                return
            self._timer.cancel()
        if not self._term.over:
            self._timer = self._loop.call_at(deadline, self._tick)

    def _tick(self) -> None:
        self._timer = None
        try:
            if self.membership.broken:
                # The agents that connect again may wait behind strangers.
                self._listener.admit_waiting()
            self._take_in_signs()
            self.connections.beat(self._loop.time(), self.membership.heartbeat_limit)
        except Exception as error:
            # Time goes on for the membership, and the heartbeats that are missing come with the next tick.
            self._loop.call_exception_handler({"message": "the leader goes on after a fault", "exception": error})
        try:
            self._handle(events.Tick())
        except Exception as error:
            # Without a clock it would judge no loss: another agent leads from here on.
            self._end(error)

    def _take_in_signs(self) -> None:
        if self._signs:
            signs, self._signs = tuple(self._signs.items()), {}
            self._handle(events.SignsOfLife(signs))

    # Its actions.

    def _act(self, action: term.TermAction) -> None:
        match action:
            case term.CarryOut(state, decision, log):
                if isinstance(decision, events.Claim):
                    self.on_claim()
                send_decision(self.connections, self.epoch, state, decision)
                if log:
                    self._journal(decision)
            case term.UseRecords():
                self._start(self._use_records(action))
            case term.Ask(question, names):
                self._start(self._ask(question, names))
            case term.StepDown(why, failed):
                self._end((RecordsError if failed else FencedError)(why) if why else None)

    async def _use_records(self, action: term.UseRecords) -> None:
        operation: Callable[..., bool | None] = getattr(self._fenced_records, action.operation.value)
        try:
            allowed = await asyncio.to_thread(operation, *action.subject)
        except RecordsError as error:
            self._handle(term.RecordsFailed(str(error)))
        else:
            self._handle(term.RecordsAnswered(action, allowed is not False))

    async def _ask(self, question: term.Question, names: Sequence[str]) -> None:
        answer = frozenset[str]()
        if question in (term.Question.ENDED, term.Question.DISCONNECTED):
            for first in range(0, len(names), _PROBED_AT_ONCE):
                some = names[first : first + _PROBED_AT_ONCE]
                absent = [agent for agent in some if not self.connections.has(agent)]
                answer |= await agents_ended(absent, self._endpoints)
        else:
            ask_slurm = nodes_down if question is term.Question.DOWN else agents_gone
            # A cut of the network that separates an agent may also keep Slurm from answering.
            answer = await run_in_thread(lambda: ask_slurm(names, self._controller))
        # The machine compares answers with the newest signs of life.
        self._take_in_signs()
        self._handle(term.Answered(question, answer))

    def _start(self, coroutine: Coroutine[None, None, None]) -> None:
        task = self._loop.create_task(self._until_it_ends(coroutine))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _until_it_ends(self, work: Awaitable[None]) -> None:
        try:
            await work
        except Exception as error:
            self._end(error)

    def _end(self, error: Exception | None) -> None:
        if self._ended.done():
            return
        if error is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(error)


_LOOPBACK = "127.0.0.1"
_SUCCESSORS = 8
"""Candidates to succeed the leader that an assignment names."""


def send_decision(connections: AgentConnections, epoch: int, state: State, decision: events.Decision) -> None:
    """Send the messages of a decision, which led to this state and is on record already if it has to be."""
    match decision:
        case events.Publish(table):
            for place in table.places:
                connections.send((place.agent,), _assignment(connections, epoch, state, table, place))
        case events.Resend(agent, table):
            place = next(place for place in table.places if place.agent == agent)
            connections.send((agent,), _assignment(connections, epoch, state, table, place))
        case events.Drop(agent):
            connections.drop(agent)
        case events.Send(agents, message, everyone):
            connections.send((*agents, *(connections.others(agents) if everyone else ())), message)
        case _:
            pass


def _assignment(
    connections: AgentConnections, epoch: int, state: State, table: Table, place: Place
) -> messages.Assignment:
    """Return an agent's place in a round, with what is the same for all members, which is made once: they are many."""
    own = state.settings.agent
    if connections.shared is None or connections.shared[0] is not table:
        # An agent that reaches none of these successors reads the others from the records.
        others = (member for member in table.places if member.agent != own)
        shared = messages.Assignment(
            attempt=0,
            place=place,
            round=table.round,
            reason=table.reason,
            nodes=len(table.places),
            world_size=table.world_size,
            # The workers of a single node reach the store by the loopback; see `worker_store`.
            store_address=_LOOPBACK if len(table.places) == 1 else table.store_address,
            store_port=table.store_port,
            restarts=table.restarts,
            epoch=epoch,
            leader=own,
            leader_node=node_of(own),
            successors=tuple(_successor(member) for member in islice(others, _SUCCESSORS)),
            members=compress(member.node for member in table.places),
            heartbeat_limit=table.heartbeat_limit,
            origin=table.origin,
        )
        connections.shared = table, shared
    shared = connections.shared[1]
    mine = _successor(place)
    among = place.agent == own or mine in shared.successors
    successors = shared.successors if among else (*shared.successors, mine)
    return replace(shared, attempt=state.agents[place.agent].attempt, place=place, successors=successors)


def _successor(place: Place) -> messages.Successor:
    return messages.Successor(place.agent, place.address, place.standby_port)
