"""The leader: listens to the agents, feeds the membership machine, and does what it decides.

Everything runs in one asyncio loop. Decisions are carried out in order by one task, because writing a round down can
take as long as the shared file system likes, while signs of life have to be noticed all the time.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine, Mapping, Sequence

from slurm_elastic.rendezvous import membership
from slurm_elastic.rendezvous.leader.agent_connections import Peers
from slurm_elastic.rendezvous.leader.fenced_records import Ledger
from slurm_elastic.rendezvous.leader.heartbeat_schedule import Beats
from slurm_elastic.rendezvous.leader.liveness_probes import Enquiries, FencedError
from slurm_elastic.rendezvous.leader.outgoing_messages import tell
from slurm_elastic.rendezvous.leave_requests import LeaveRequest, LeaveRequested, who_is_meant
from slurm_elastic.rendezvous.membership import (
    Claim,
    Claimed,
    Decision,
    Disconnected,
    Event,
    Finish,
    Heard,
    Interrupt,
    Joined,
    Phase,
    Publish,
    Resign,
    Settings,
    State,
    Tick,
)
from slurm_elastic.rendezvous.transport.connect import Endpoint
from slurm_elastic.rendezvous.transport.listener import Door
from slurm_elastic.rendezvous.transport.messages import Beat, MessageError, decode_agent_message
from slurm_elastic.rendezvous.transport.server_connection import AcceptedConnection

__all__ = ["FencedError", "Leader"]

_BACKLOG, _AT_ONCE = 4096, 16
"""Connections that may wait to be accepted, and that are accepted together."""


class Leader:
    """One leader's term.

    Args:
        run: run id and incarnation, which all agents of the term share.
        secret: the run's secret.
        epoch: number of the term.
        settings: of the membership.
        ledger: where rounds are written down before they are published.
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
        ledger: Ledger,
        journal: Callable[[Decision], None],
        nodes_down: Callable[[Sequence[str]], frozenset[str]] | None = None,
        agents_gone: Callable[[Sequence[str]], frozenset[str]] | None = None,
        places: Mapping[str, Endpoint] | None = None,
    ) -> None:
        self.run, self.secret, self.epoch = run, secret, epoch
        self._settings = settings
        self._ledger = ledger
        self._journal = journal
        self._nodes_down, self._agents_gone = nodes_down, agents_gone
        self._places: dict[str, Endpoint] = dict(places or {})
        self.claimed = asyncio.Event()
        """Set once the epoch is this leader's own."""
        self._peers = Peers(Beats(settings.heartbeat_limit / 3, settings.tick_interval))
        self.rejected = self._peers.rejected
        self._signs: dict[str, float] = {}
        self._decisions: asyncio.Queue[tuple[State, Decision]] = asyncio.Queue()
        self._timer: asyncio.TimerHandle | None = None
        # Its times begin when it serves.
        self._state = membership.initial_state(settings, 0.0)

    def in_the_way(self) -> bool:
        """See :func:`~.membership.in_the_way`."""
        return membership.in_the_way(self._state)

    async def serve(self, listener: socket.socket) -> None:
        """Lead until cancelled, or until this leader has resigned.

        Args:
            listener: bound and listening; closed at the end.

        Raises:
            FencedError: another agent leads this run.
            RecordsError: what has to be written down cannot be.
        """
        self._loop = asyncio.get_running_loop()
        self._state = membership.initial_state(self._settings, self._loop.time())
        enquiries = self._enquiries = Enquiries(
            lambda: self._state, self._found_out, self._ledger, self._places, self._nodes_down, self._agents_gone
        )
        enquiries.note(self._state)
        if self._state.claimed:
            self.claimed.set()
        listener.listen(_BACKLOG)
        door = Door(listener, lambda: AcceptedConnection(self, self.secret, self.run, self.epoch), _AT_ONCE)
        self._schedule()
        try:
            # A leader that has nobody to wait for asks for its epoch at once.
            self._handle(Tick())
            await _until_first(
                self._carry_out(),
                enquiries.look_for_members(),
                enquiries.look_for_leaders(),
                _for_ever(enquiries.ask_about_agents()),
                _for_ever(enquiries.ask_about_nodes()),
            )
        finally:
            door.close()
            listener.close()
            if self._timer is not None:
                self._timer.cancel()
            self._peers.close()

    async def everybody_told(self) -> None:
        """Return when every decision is carried out and every agent has gone."""
        await self._decisions.join()
        while len(self._peers):
            await asyncio.sleep(0.02)
            await self._decisions.join()

    # What the connections report.

    def opened(self, connection: AcceptedConnection) -> None:
        """See :class:`~.connection.Host`."""
        self._peers.opened(connection)

    def authenticated(self, connection: AcceptedConnection) -> None:
        """See :class:`~.connection.Host`."""
        self._peers.authenticated(connection)

    def reject(self, connection: AcceptedConnection, why: str) -> None:
        """See :class:`~.connection.Host`."""
        self._peers.reject(connection, why)

    def closed(self, connection: AcceptedConnection) -> None:
        """See :class:`~.connection.Host`."""
        if self._peers.closed(connection):
            self._handle(Disconnected(connection.agent))

    def received(self, connection: AcceptedConnection, content: dict[str, object]) -> None:
        """See :class:`~.connection.Host`."""
        if not self._peers.current(connection):
            return
        self._signs[connection.agent] = self._loop.time()
        try:
            message = decode_agent_message(content, connection.agent)
        except MessageError as error:
            self._peers.reject(connection, str(error))
            return
        if isinstance(message, Joined):
            candidate = message.candidate
            self._places[candidate.agent] = (candidate.address, candidate.standby_port)
        if isinstance(message, LeaveRequest):
            self._pass_on(connection, message)
        elif not isinstance(message, Beat):
            self._handle(message)

    def _pass_on(self, connection: AcceptedConnection, request: LeaveRequest) -> None:
        agents = self._state.agents.items() if self._state.phase is not Phase.CLOSED else ()
        meant, answer = who_is_meant(request, {name: agent.candidate.node for name, agent in agents})
        self._peers.send(meant, LeaveRequested(request.reason, request.seconds, request.detail))
        self._peers.send((connection.agent,), answer)

    # The machine.

    def _handle(self, event: Event) -> None:
        state, decisions = membership.step(self._state, event, self._loop.time())
        self._state = state
        self._enquiries.note(state)
        for decision in decisions:
            self._decisions.put_nowait((state, decision))
        self._schedule()

    def _found_out(self, event: Event) -> None:
        # What Slurm or a node says is compared with the newest signs of life.
        self._take_in_signs()
        self._handle(event)

    def _schedule(self) -> None:
        deadline = membership.next_deadline(self._state)
        if self._timer is not None:
            if not self._timer.cancelled() and self._timer.when() <= deadline:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(deadline, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._take_in_signs()
        self._handle(Tick())
        self._peers.beat(self._loop.time())

    def _take_in_signs(self) -> None:
        if self._signs:
            signs, self._signs = tuple(self._signs.items()), {}
            self._handle(Heard(signs))

    # Carrying out.

    async def _carry_out(self) -> None:
        resigned, ended = False, -1
        while not resigned:
            state, decision = await self._decisions.get()
            await self._write_down(state, decision)
            tell(self._peers, self.epoch, state, decision)
            # Whoever follows a leader tells each member by itself that its round is over.
            if not isinstance(decision, Interrupt) or decision.round > ended:
                self._journal(decision)
            if isinstance(decision, Interrupt):
                ended = max(ended, decision.round)
            self._decisions.task_done()
            resigned = isinstance(decision, Resign)

    async def _write_down(self, state: State, decision: Decision) -> None:
        match decision:
            case Claim():
                if not await asyncio.to_thread(self._ledger.claim):
                    raise FencedError(f"somebody else has taken epoch {self.epoch}")
                self.claimed.set()
                self._handle(Claimed())
            case Publish(table):
                if not await asyncio.to_thread(self._ledger.claim_round, table):
                    raise FencedError(f"round {table.round} was published by another leader")
            case Finish() if state.claimed:
                if not await asyncio.to_thread(self._ledger.finish, decision):
                    raise FencedError("somebody else leads with a newer epoch")
            case _:
                pass


async def _for_ever(task: Coroutine[None, None, None]) -> None:
    await task
    await asyncio.Event().wait()


async def _until_first(*coroutines: Coroutine[None, None, None]) -> None:
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
