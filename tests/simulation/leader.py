"""The leader as the product drives the machine, in virtual time."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from slurm_elastic.rendezvous.membership import events, machine
from slurm_elastic.rendezvous.membership.advance import next_deadline
from slurm_elastic.rendezvous.membership.assignment import Table
from slurm_elastic.rendezvous.membership.config import Settings
from slurm_elastic.rendezvous.membership.leader_change import missing
from slurm_elastic.rendezvous.membership.state import State, initial_state
from tests.simulation.network import Connection, Hello, Place, Welcome

if TYPE_CHECKING:
    from tests.simulation.world import World


class SimulatedLeader:
    """Feeds the machine one event at a time, and carries out what it decides, in order, perhaps later."""

    def __init__(self, world: World, settings: Settings) -> None:
        self.world = world
        self.state = initial_state(settings, world.now)
        self._connections: dict[str, Connection] = {}
        self._signs: dict[str, float] = {}
        self._decisions: deque[tuple[State, events.Decision]] = deque()
        self._carrying_out = False
        self._ledger_free_at = 0.0
        self._stalled = False
        self._probing = False
        self._unread: list[tuple[Connection, object]] = []
        self._timer: float | None = None
        self._timer_missed = False

    def start(self) -> None:
        """Begin to watch the clock."""
        self._schedule()

    def stall(self, seconds: float, *, timer_first: bool) -> None:
        """Do nothing for a while."""
        if not self._stalled:
            self._stalled = True
            self.world.at(self.world.now + seconds, self._go_on, timer_first)

    def slow_ledger(self, seconds: float) -> None:
        """Publish nothing for a while."""
        self._ledger_free_at = max(self._ledger_free_at, self.world.now + seconds)

    def handle(self, event: events.Event) -> None:
        """Process one event."""
        before = self.state
        self.state, decisions = machine.step(before, event, self.world.now)
        self.world.checks.after_step(before, event, self.state, decisions)
        for decision in decisions:
            self._decisions.append((self.state, decision))
        self._carry_out()
        self._schedule()
        if missing(self.state) and not self._probing:
            self._probing = True
            self.world.at(self.world.now + 0.3, self._probe)

    def _probe(self) -> None:
        """Find out which of the members that are missing have ended: their nodes refuse a connection."""
        absent = missing(self.state)
        if not absent or self._stalled:
            self._probing = bool(absent)
        else:
            self._probing = True
            ended = frozenset(name for name in absent if not self.world.agents[name].alive)
            if ended:
                self.handle(events.Gone(ended))
        if self._probing:
            self.world.at(self.world.now + 0.3, self._probe)

    # What arrives.

    def receive(self, connection: Connection, message: object) -> None:
        """Take a message, or None when a connection has ended."""
        if self._stalled:
            self._unread.append((connection, message))
            return
        name = connection.agent.name
        if isinstance(message, Hello):
            older = self._connections.get(name)
            self._connections[name] = connection
            if older is not None:
                older.close_by_leader()
            connection.send_down(Welcome())
            return
        if self._connections.get(name) is not connection:
            return
        if message is None:
            del self._connections[name]
            self.handle(events.Disconnected(name))
            return
        self._signs[name] = self.world.now
        self.handle(message)  # type: ignore[arg-type]

    def _go_on(self, timer_first: bool) -> None:
        self._stalled = False
        if timer_first and self._timer_missed:
            self._timer_missed = False
            self.handle(events.Tick())
            self._timer_missed = True
        unread, self._unread = self._unread, []
        for connection, message in unread:
            self.receive(connection, message)
        if self._timer_missed:
            self._tick()

    # Time.

    def _schedule(self) -> None:
        deadline = max(next_deadline(self.state), self.world.now)
        if self._timer is None or self._timer > deadline:
            self._timer = deadline
            self.world.at(deadline, self._timer_fires, deadline)

    def _timer_fires(self, deadline: float) -> None:
        if deadline != self._timer:
            return
        if self._stalled:
            self._timer_missed = True
        else:
            self._tick()

    def _tick(self) -> None:
        self._timer = None
        self._timer_missed = False
        self.take_in_signs()
        self.handle(events.Tick())

    def take_in_signs(self) -> None:
        """Let the machine know who has given a sign of life."""
        for name, connection in self._connections.items():
            beat = connection.agent.last_beat(connection)
            if beat > self._signs.get(name, 0.0):
                self._signs[name] = beat
        if self._signs:
            signs, self._signs = tuple(self._signs.items()), {}
            self.handle(events.SignsOfLife(signs))

    # Carrying out.

    def _carry_out(self) -> None:
        if self._carrying_out:
            return
        while self._decisions:
            state, decision = self._decisions[0]
            if isinstance(decision, events.Publish | events.Finish) and self.world.now < self._ledger_free_at:
                self._carrying_out = True
                self.world.at(self._ledger_free_at, self._written)
                return
            self._decisions.popleft()
            self._tell(state, decision)

    def _written(self) -> None:
        self._carrying_out = False
        self._carry_out()

    def _tell(self, state: State, decision: events.Decision) -> None:
        match decision:
            case events.Publish(table):
                for place in table.places:
                    self._send_place(state, place.agent, table)
            case events.Resend(agent, table):
                self._send_place(state, agent, table)
            case events.Send(agents, message):
                for agent in agents:
                    self._send(agent, message)
            case events.Drop(agent) if agent in self._connections:
                self._connections.pop(agent).close_by_leader()
            case _:
                pass

    def _send_place(self, state: State, agent: str, table: Table) -> None:
        self._send(agent, Place(state.agents[agent].attempt, table))

    def _send(self, agent: str, message: object) -> None:
        if agent in self._connections:
            self._connections[agent].send_down(message)
