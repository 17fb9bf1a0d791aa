"""The leader: receives what agents say, feeds the machine of its term, and carries out its actions.

Everything runs in one asyncio loop; what may block, such as the records, in threads.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import socket
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence

from slurm_elastic.rendezvous.election import term
from slurm_elastic.rendezvous.election.term import (
    AgentsEnded,
    AgentsGone,
    AskSlurmAboutAgents,
    AskSlurmAboutNodes,
    CheckTerm,
    ClaimTerm,
    ConfirmLastRound,
    NodesDown,
    ProbeMembers,
    PublishEndpoint,
    RecordEnd,
    RecordsAction,
    RecordsAnswered,
    RecordsFailed,
    ReportBlocking,
    ReportClaimed,
    StepDown,
    Tell,
    TermAction,
    TermEvent,
    Wake,
    WriteRound,
)
from slurm_elastic.rendezvous.leader.absent_agents import agents_ended, known_places
from slurm_elastic.rendezvous.leader.agent_connections import AgentConnections
from slurm_elastic.rendezvous.leader.fenced_records import FencedRecords
from slurm_elastic.rendezvous.leader.outgoing_messages import send_decision
from slurm_elastic.rendezvous.leader.releases import Releases
from slurm_elastic.rendezvous.leader.status_collector import StatusCollector
from slurm_elastic.rendezvous.leave_requests import LeaveRequest, LeaveRequested, who_is_meant
from slurm_elastic.rendezvous.membership import (
    Decision,
    Disconnected,
    Heard,
    Joined,
    Phase,
    Returning,
    Settings,
    State,
    Tick,
)
from slurm_elastic.rendezvous.records.api import RecordsError
from slurm_elastic.rendezvous.run_in_thread import run_in_thread
from slurm_elastic.rendezvous.status_requests import StatusAnswer, StatusReport, StatusRequest
from slurm_elastic.rendezvous.transport.connect import Endpoint
from slurm_elastic.rendezvous.transport.listener import Listener
from slurm_elastic.rendezvous.transport.messages import Beat, MessageError, decode_agent_message
from slurm_elastic.rendezvous.transport.server_connection import AcceptedConnection
from slurm_elastic.rendezvous.transport.session import Role, Session

__all__ = ["FencedError", "Leader"]

logger = logging.getLogger("slurm_elastic")

_BACKLOG, _AT_ONCE = 4096, 16
"""Connections that may wait to be accepted, and that are accepted together."""
_PROBED_AT_ONCE = 64
"""Nodes that are asked together about members: each question takes a descriptor."""


class FencedError(Exception):
    """Another agent leads this run with a newer epoch, or this agent does not lead it any more."""


class Leader:
    """One leader's term.

    Args:
        run: run id and incarnation, which all agents of the term share.
        secret: the run's secret.
        epoch: number of the term.
        settings: of the membership.
        fenced_records: where rounds are written down before they are published.
        journal: told every decision, after it was carried out.
        nodes_down: asks Slurm which of these nodes are down; called in a thread while nodes are missing.
        agents_gone: asks Slurm which of these agents are gone; called in a thread while a majority is missing.
        places: where members of the last round listen.
    """

    def __init__(
        self,
        run: str,
        secret: bytes,
        epoch: int,
        settings: Settings,
        fenced_records: FencedRecords,
        journal: Callable[[Decision], None],
        nodes_down: Callable[[Sequence[str]], frozenset[str]] | None = None,
        agents_gone: Callable[[Sequence[str]], frozenset[str]] | None = None,
        places: Mapping[str, Endpoint] | None = None,
    ) -> None:
        self.run, self.secret, self.epoch = run, secret, epoch
        self._settings = settings
        self._fenced_records = fenced_records
        self._journal = journal
        self._nodes_down, self._agents_gone = nodes_down, agents_gone
        self._places: dict[str, Endpoint] = dict(places or {})
        self.claimed = asyncio.Event()
        """Set once the epoch is this leader's own."""
        self._connections = AgentConnections()
        self.rejected = self._connections.rejected
        self._signs: dict[str, float] = {}
        self._releases = Releases()
        self._status = StatusCollector(self._connections, self._agent_nodes, self._summary)
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.report: Callable[[ReportClaimed | ReportBlocking], None] = lambda action: None
        """Told when the epoch is claimed, and when this candidate begins or ends to block others."""
        self._listener: Listener | None = None
        # Its times begin when it serves.
        self._term = term.initial_term(epoch, settings, 0.0)

    @property
    def _state(self) -> State:
        return self._term.membership

    async def serve(self, listening: socket.socket) -> None:
        """Lead until cancelled, or until this leader has resigned.

        Args:
            listening: bound and listening; closed at the end.

        Raises:
            FencedError: another agent leads this run.
            RecordsError: what has to be written down cannot be.
        """
        self._loop = asyncio.get_running_loop()
        self._term = term.initial_term(self.epoch, self._settings, self._loop.time())
        self._ended: asyncio.Future[None] = self._loop.create_future()
        if self._state.claimed:
            self.claimed.set()
        listening.listen(_BACKLOG)
        listener = self._listener = Listener(
            listening,
            self._new_session,
            lambda admitted, stream: AcceptedConnection(self, admitted, stream),
            self.reject,
            self._connections.room,
            _AT_ONCE,
        )
        self._schedule()
        try:
            # A leader that has nobody to wait for asks for its epoch at once.
            self._handle(Tick())
            await self._ended
        finally:
            listener.close()
            listening.close()
            if self._timer is not None:
                self._timer.cancel()
            self._connections.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def wait_until_all_left(self) -> None:
        """Return when every decision is carried out and every agent has gone."""
        while len(self._connections) or self._term.queue:
            await asyncio.sleep(0.02)

    # What the connections report.

    def _new_session(self) -> Session:
        connections = self._connections
        return Session(
            Role.LEADER,
            self.secret,
            self.run,
            epoch=self.epoch,
            busy=connections.busy,
            repeated=connections.repeated,
        )

    def opened(self, connection: AcceptedConnection) -> None:
        """See :class:`~.connection.Host`."""
        self._connections.opened(connection)
        if connection.named in self._state.broken:
            self._handle(Returning(connection.named))

    def authenticated(self, connection: AcceptedConnection) -> None:
        """See :class:`~.connection.Host`."""
        self._connections.authenticated(connection)

    def reject(self, peer: str, why: str) -> None:
        """See :class:`~.connection.Host`."""
        self._connections.reject(peer, why)

    def closed(self, connection: AcceptedConnection) -> None:
        """See :class:`~.connection.Host`."""
        if self._connections.closed(connection) or (
            not connection.agent and not self._connections.has(connection.named)
        ):
            # The latter was on its way back, and has not come.
            self._handle(Disconnected(connection.named))

    def received(self, connection: AcceptedConnection, content: dict[str, object]) -> None:
        """See :class:`~.connection.Host`."""
        if not self._connections.current(connection):
            return
        self._signs[connection.agent] = self._loop.time()
        try:
            message = decode_agent_message(content, connection.agent)
        except MessageError as error:
            self._connections.reject(connection.peer, str(error))
            return
        if isinstance(message, Joined):
            candidate = message.candidate
            self._places[candidate.agent] = (candidate.address, candidate.standby_port)
            difference = self._releases.note(candidate.node, candidate.releases)
            if difference:
                logger.warning("%s", difference)
        if isinstance(message, LeaveRequest):
            self._pass_on(connection, message)
        elif isinstance(message, StatusRequest):
            if self._status.ask(message.agent):
                self._start(self._status.collect())
        elif isinstance(message, StatusReport):
            self._status.reported(message)
        elif not isinstance(message, Beat):
            self._handle(message)

    def _pass_on(self, connection: AcceptedConnection, request: LeaveRequest) -> None:
        meant, answer = who_is_meant(request, self._agent_nodes() if self._state.phase is not Phase.CLOSED else {})
        self._connections.send(meant, LeaveRequested(request.reason, request.seconds, request.detail))
        self._connections.send((connection.agent,), answer)

    def _agent_nodes(self) -> dict[str, str]:
        return {name: agent.candidate.node for name, agent in self._state.agents.items()}

    def _summary(self) -> StatusAnswer:
        state = self._state
        since = state.published_at if state.phase is Phase.RUNNING else state.forming_since
        return StatusAnswer(
            leader=self._settings.agent,
            epoch=self.epoch,
            phase=state.phase.value,
            seconds=round(max(0.0, self._loop.time() - since), 3),
            asked=0,
            answered=0,
            min_nodes=self._settings.min_nodes,
            max_nodes=self._settings.max_nodes,
        )

    # The machine.

    def _handle(self, event: TermEvent) -> None:
        self._term, actions = term.step(self._term, event, self._loop.time())
        for action in actions:
            self._act(action)
        self._schedule()

    def _found_out(self, event: TermEvent) -> None:
        # What Slurm or a node says is compared with the newest signs of life.
        self._take_in_signs()
        self._handle(event)

    def _schedule(self) -> None:
        deadline = min(self._term.deadline, self._connections.schedule.next_at)
        if self._timer is not None:
            if not self._timer.cancelled() and self._timer.when() <= deadline:
                return
            self._timer.cancel()
        if not self._term.over:
            self._timer = self._loop.call_at(deadline, self._tick)

    def _tick(self) -> None:
        self._timer = None
        if self._state.broken and self._listener is not None:
            # They may wait behind strangers.
            self._listener.admit_waiting()
        self._take_in_signs()
        self._connections.beat(self._loop.time(), self._state.heartbeat_limit)
        self._handle(Wake())

    def _take_in_signs(self) -> None:
        if self._signs:
            signs, self._signs = tuple(self._signs.items()), {}
            self._handle(Heard(signs))

    # Its actions.

    def _act(self, action: TermAction) -> None:
        match action:
            case Tell(state, decision, note):
                send_decision(self._connections, self.epoch, state, decision)
                if note:
                    self._journal(decision)
            case ClaimTerm():
                self._ask_records(action, self._fenced_records.take)
            case ConfirmLastRound():
                self._ask_records(action, self._fenced_records.confirm)
            case PublishEndpoint():
                self._ask_records(action, self._fenced_records.publish_endpoint)
            case CheckTerm():
                self._ask_records(action, self._fenced_records.leads)
            case WriteRound(table):
                self._ask_records(action, functools.partial(self._fenced_records.write_round, table))
            case RecordEnd(finish):
                self._ask_records(action, functools.partial(self._fenced_records.finish, finish))
            case ProbeMembers(agents):
                self._start(self._probe(agents))
            case AskSlurmAboutAgents(agents):
                if self._agents_gone is not None:
                    self._start(self._ask(functools.partial(self._agents_gone, agents), AgentsGone))
            case AskSlurmAboutNodes(nodes):
                if self._nodes_down is not None:
                    self._start(self._ask(functools.partial(self._nodes_down, nodes), NodesDown))
            case ReportClaimed():
                self.claimed.set()
                self.report(action)
            case ReportBlocking():
                self.report(action)
            case StepDown(why, failed):
                self._end((RecordsError if failed else FencedError)(why) if why else None)

    def _ask_records(self, action: RecordsAction, operation: Callable[[], bool | None]) -> None:
        async def ask() -> None:
            try:
                allowed = await asyncio.to_thread(operation)
            except RecordsError as error:
                self._handle(RecordsFailed(action, str(error)))
            else:
                self._handle(RecordsAnswered(action, allowed is not False))

        self._start(ask())

    async def _probe(self, agents: Sequence[str]) -> None:
        ended: set[str] = set()
        for first in range(0, len(agents), _PROBED_AT_ONCE):
            some = agents[first : first + _PROBED_AT_ONCE]
            absent = [agent for agent in some if not self._connections.has(agent)]
            ended |= await agents_ended(known_places(absent, self._places))
        self._found_out(AgentsEnded(frozenset(ended)))

    async def _ask(self, question: Callable[[], frozenset[str]], answer: Callable[[frozenset[str]], TermEvent]) -> None:
        # Slurm may not answer as long as the network is cut that an agent is missed for.
        self._found_out(answer(await run_in_thread(question)))

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
