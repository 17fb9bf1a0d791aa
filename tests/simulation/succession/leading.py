"""A leader in virtual time: the real machine and the real ledger, every step of which takes its time."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from slurm_elastic.rendezvous import membership
from slurm_elastic.rendezvous.leader.fenced_records import Ledger
from slurm_elastic.rendezvous.membership import (
    Claim,
    Claimed,
    Decision,
    Disconnected,
    Drop,
    Event,
    Gone,
    Heard,
    Hold,
    Interrupt,
    Phase,
    Probe,
    Publish,
    Resend,
    Resign,
    Settings,
    State,
    Table,
    Tick,
)
from tests.simulation.succession.wire import Wire

if TYPE_CHECKING:
    from tests.simulation.succession.party import Party
    from tests.simulation.succession.world import World

__all__ = ["Beat", "Holding", "Leading", "Placed", "Resigned"]


class Beat:
    """A sign of life."""


class Holding:
    """A round comes to its planned end."""

    def __init__(self, round_: int, leaving: tuple[str, ...]) -> None:
        self.round, self.leaving = round_, leaving


class Resigned:
    """The leader goes, and some members have gone."""

    def __init__(self, gone: frozenset[str]) -> None:
        self.gone = gone


class Placed:
    """A place in a table."""

    def __init__(self, attempt: int, table: Table, epoch: int, leader: str) -> None:
        self.attempt, self.table, self.epoch, self.leader = attempt, table, epoch, leader


class Leading:
    """One leader on its agent's process; it ends when it is superseded, resigns, or its process does."""

    def __init__(self, world: World, party: Party, epoch: int, settings: Settings, ledger: Ledger) -> None:
        self.world, self.party, self.epoch, self.ledger = world, party, epoch, ledger
        self.stood_at = world.now
        self.state = membership.initial_state(settings, world.now)
        self._deadline = membership.next_deadline(self.state)
        self.over = False
        self.wires: dict[str, Wire] = {}
        self._signs: dict[str, float] = {}
        self._decisions: deque[tuple[State, Decision]] = deque()
        self._writing = False
        self._beat_at = self._probe_at = self._look_at = world.now

    def handle(self, event: Event) -> None:
        if self.over:
            return
        self.state, decisions = membership.step(self.state, event, self.world.now)
        self._deadline = membership.next_deadline(self.state)
        if self.world.story is not None and not isinstance(event, Tick | Heard):
            self.world.tell(f"leader {self.epoch} on {self.party.name}", f"{event} -> {[*decisions]}")
        self._decisions.extend((self.state, decision) for decision in decisions)
        self._carry_out()
        self.party.wake_at(self.next_look())

    def next_look(self) -> float:
        """When to call :meth:`tick` at the latest."""
        if self.over:
            return math.inf
        moment = min(self._deadline, self._beat_at)
        if self.state.phase is Phase.FORMING:
            if self.state.claimed:
                moment = min(moment, self._look_at)
            if self._probe_at < moment and membership.missing(self.state):
                moment = self._probe_at
        return moment

    def tick(self) -> None:
        """Whatever time brings."""
        now, limit = self.world.now, self.state.settings.heartbeat_limit
        if now >= self._deadline:
            if self._signs:
                signs, self._signs = tuple(self._signs.items()), {}
                self.handle(Heard(signs))
            self.handle(Tick())
        if now >= self._beat_at:
            self._beat_at = now + limit / 3
            for wire in [*self.wires.values()]:
                wire.send_down(Beat())
        if now >= self._probe_at and not self.over:
            self._probe_at = now + 0.3
            missing = membership.missing(self.state)
            ended = frozenset(name for name in missing if self.world.has_ended(self.party, name))
            if ended:
                self.handle(Gone(ended))
        if now >= self._look_at and not self.over:
            self._look_at = now + 1.0
            if self.state.phase is Phase.FORMING and self.state.claimed:
                self._written(self.ledger.leads, lambda: None)

    # Wires.

    def accept(self, wire: Wire) -> None:
        older = self.wires.get(wire.member.name)
        self.wires[wire.member.name] = wire
        if older is not None:
            older.close_by_leader()

    def hear(self, wire: Wire, message: object) -> None:
        name = wire.member.name
        if self.wires.get(name) is wire:
            self._signs[name] = self.world.now
            if not isinstance(message, Beat):
                self.handle(message)  # type: ignore[arg-type]

    def lose(self, wire: Wire) -> None:
        name = wire.member.name
        wire.close_by_leader()
        if self.wires.get(name) is wire:
            del self.wires[name]
            self.handle(Disconnected(name))

    def end(self, *, told: bool = True) -> None:
        """Lead no more."""
        self.over = True
        if self.party.leading is self:
            self.party.leading = None
        for wire in [*self.wires.values()]:
            wire.close_by_leader(told=told)

    # Decisions, one after the other.

    def _carry_out(self) -> None:
        while self._decisions and not self._writing and not self.over:
            _, decision = self._decisions[0]
            if isinstance(decision, Claim):
                self._write(self._take, lambda: self._written(self._confirm, self._claimed))
            elif isinstance(decision, Publish):
                self._write(
                    self.ledger.leads,
                    lambda table=decision.table: self._written(
                        lambda: self.ledger.write_round(table), lambda: self._written(self.ledger.leads, self._done)
                    ),
                )
            else:
                self._done()

    def _write(self, operation: Callable[[], bool], then: Callable[[], None]) -> None:
        self._writing = True
        self._written(operation, then)

    def _written(self, operation: Callable[[], bool], then: Callable[[], None]) -> None:
        """Do something with the records in a while, and go on if it was allowed."""

        def answer(allowed: bool) -> None:
            if self.over:
                return
            if allowed:
                then()
            else:
                self.world.tell(f"leader {self.epoch} on {self.party.name}", "is superseded")
                self.end()

        # The operation happens at some moment, and its result is known at a later one; a paused process learns it late.
        def happen() -> None:
            self.world.before_message(self.party)
            if self.party.alive:
                allowed = operation()
                self.world.before_message(self.party)
                self.party.later(self.world.disk(), lambda: answer(allowed))

        self.world.at(self.world.now + self.world.disk(), happen)

    def _take(self) -> bool:
        taken = self.ledger.take()
        if taken:
            self.world.checks.after_take(self)
        return taken

    def _confirm(self) -> bool:
        confirmed = self.ledger.confirm()
        if confirmed:
            self.world.checks.after_claim(self)
        return confirmed

    def _claimed(self) -> None:
        self._done()
        self.handle(Claimed())

    def _done(self) -> None:
        self._writing = False
        state, decision = self._decisions.popleft()
        self._tell(state, decision)
        self._carry_out()

    def _tell(self, state: State, decision: Decision) -> None:
        match decision:
            case Publish(table):
                self.world.checks.after_publish(self, table)
                for place in table.places:
                    self._send(place.agent, self._place(state, place.agent, table))
            case Resend(agent, table):
                self._send(agent, self._place(state, agent, table))
            case Hold(agents, round_):
                leaving = (name for name, agent in state.agents.items() if agent.leave_reason is not None)
                self._send_all(agents, Holding(round_, tuple(leaving)))
            case Interrupt(agents) | Probe(agents):
                self._send_all(agents, decision)
            case Drop(agent) if agent in self.wires:
                self.wires.pop(agent).close_by_leader()
            case Resign():
                self._send_all([*self.wires], Resigned(state.gone - state.lingering))
                self.end()
            case _:
                pass

    def _place(self, state: State, agent: str, table: Table) -> Placed:
        return Placed(state.agents[agent].attempt, table, self.epoch, self.party.name)

    def _send(self, agent: str, message: object) -> None:
        if agent in self.wires:
            self.wires[agent].send_down(message)

    def _send_all(self, agents: Iterable[str], message: object) -> None:
        for agent in agents:
            self._send(agent, message)
