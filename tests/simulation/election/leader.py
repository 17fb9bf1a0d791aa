"""A leader in virtual time: the product's term and membership machines, whose actions take their time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from slurm_elastic.rendezvous.election import term
from slurm_elastic.rendezvous.election.campaign import Campaign
from slurm_elastic.rendezvous.election.events import LeaderClaimed, LeaderEnded
from slurm_elastic.rendezvous.leader.fenced_records import FencedRecords
from slurm_elastic.rendezvous.leader.leader import send_decision
from slurm_elastic.rendezvous.membership.events import Claim, Disconnected, Interrupt, Publish, SignsOfLife, Tick
from slurm_elastic.rendezvous.membership.state import State
from slurm_elastic.rendezvous.transport.messages import AgentMessage, Heartbeat, LeaderMessage
from tests.simulation.election.wire import Wire

if TYPE_CHECKING:
    from tests.simulation.election.agent import Agent
    from tests.simulation.election.world import World

_BEAT = Heartbeat()


class Leader:
    """One leader on its agent's process; it ends when it is superseded, resigns, or its process does.

    Attributes:
        began_at: when it began to collect joins.
        shared: as of :class:`~slurm_elastic.rendezvous.leader.agent_connections.AgentConnections`.
        term: state of the product's machine.
        loses_answer: whether the next action on the records is not answered.
        answers: how many actions on the records were answered, or not.
    """

    def __init__(self, world: World, agent: Agent, number: int, campaign: Campaign, scope: str) -> None:
        self.world, self.agent, self.number = world, agent, number
        self.began_at = world.now
        endpoint = {
            "agent": agent.name,
            "epoch": campaign.term,
            "address": agent.endpoint[0],
            "port": agent.endpoint[1],
        }
        self.ledger = FencedRecords(world.records, scope, campaign.term, endpoint, campaign.follows)
        self.term = term.initial_term(campaign.term, campaign.settings, world.now)
        self.over = self.loses_answer = False
        self.answers = 0
        self.shared: object = None
        self.wires: dict[str, Wire] = {}
        self._signs: dict[str, float] = {}
        self._beat_at = world.now

    @property
    def epoch(self) -> int:
        return self.term.number

    @property
    def claimed(self) -> bool:
        return self.term.membership.claimed

    def next_look(self) -> float:
        """When to call :meth:`look` at the latest."""
        return math.inf if self.over else min(self.term.deadline, self._beat_at)

    def look(self) -> None:
        """Whatever time brings."""
        now = self.world.now
        if now >= self.term.deadline:
            self.take_in_signs()
            self.handle(Tick())
        if now >= self._beat_at and not self.over:
            self._beat_at = now + self.world.limit / 3
            for wire in [*self.wires.values()]:
                wire.send_down(_BEAT)

    def take_in_signs(self) -> None:
        if self._signs:
            signs, self._signs = tuple(self._signs.items()), {}
            self.handle(SignsOfLife(signs))

    def handle(self, event: term.TermEvent) -> None:
        if self.over:
            return
        self.term, actions = term.step(self.term, event, self.world.now)
        if self.world.transcript is not None and not isinstance(event, Tick | SignsOfLife):
            shown = [action.decision if isinstance(action, term.CarryOut) else action for action in actions]
            self.world.tell(f"leader {self.epoch} on {self.agent.name}", f"{event} -> {shown}")
        for action in actions:
            self._act(action)
        self.agent.wake_at(self.next_look())

    # Wires.

    def accept(self, wire: Wire) -> None:
        older = self.wires.get(wire.member.name)
        self.wires[wire.member.name] = wire
        if older is not None:
            older.close_by_leader()

    def hear(self, wire: Wire, message: AgentMessage) -> None:
        name = wire.member.name
        if self.wires.get(name) is wire:
            self._signs[name] = self.world.now
            if not isinstance(message, Heartbeat):
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
        if self.agent.leader is self:
            self.agent.leader = None
        for wire in [*self.wires.values()]:
            wire.close_by_leader(told=told)

    # As the product's connections of agents.

    def send(self, agents: Sequence[str], message: LeaderMessage) -> None:
        for agent in agents:
            if agent in self.wires:
                self.wires[agent].send_down(message)

    def others(self, agents: Sequence[str]) -> tuple[str, ...]:
        return tuple(name for name in self.wires if name not in agents)

    def drop(self, agent: str) -> None:
        if agent in self.wires:
            self.wires.pop(agent).close_by_leader()

    # Actions.

    def _act(self, action: term.TermAction) -> None:
        match action:
            case term.CarryOut(state, decision):
                if isinstance(decision, Publish):
                    self.world.checks.after_publish(self, decision.table)
                elif isinstance(decision, Interrupt) and decision.failure is not None and decision.unusable is None:
                    self.world.checks.after_charge(decision.message.round)
                elif isinstance(decision, Claim):
                    self.agent.handle(LeaderClaimed(self.number))
                send_decision(self, self.epoch, state, decision)  # type: ignore[arg-type]
            case term.UseRecords():
                self._use_records(action)
            case term.Ask(term.Question.GONE, agents):
                gone = frozenset(name for name in agents if self.world.slurm_knows(name))
                self.agent.later(self.world.delay(), lambda: self._answered(action.question, gone))
            case term.Ask(question, agents):
                ended, unanswered = self.world.probe(self.agent, agents)
                seconds = 1.0 if unanswered else self.world.delay()
                self.agent.later(seconds, lambda: self._answered(question, ended))
            case term.StepDown():
                self.world.tell(f"leader {self.epoch} on {self.agent.name}", f"steps down {action.why}")
                self.end()
                problem = action.why if action.failed else ""
                self.agent.later(0.0, lambda: self.agent.handle(LeaderEnded(self.number, problem)))
            case _:
                raise AssertionError(action)

    def _answered(self, question: term.Question, names: frozenset[str]) -> None:
        self.take_in_signs()
        self.handle(term.Answered(question, names))

    def _use_records(self, action: term.UseRecords) -> None:
        """The operation happens at some moment, and its result is known at a later one; a paused process learns it
        late, and one that has ended never does it, or never learns what it did."""

        def happen() -> None:
            self.world.before_message(self.agent)
            if self.agent.alive:
                lost, self.loses_answer = self.loses_answer, False
                self.answers += 1
                allowed = (not lost or self.agent.rng.random() < 0.5) and self._operate(action)
                self.world.before_message(self.agent)
                answer = term.RecordsFailed("the disk is full") if lost else term.RecordsAnswered(action, allowed)
                self.agent.later(self.world.disk(), lambda: self.handle(answer))

        self.world.at(self.world.now + self.world.disk(), happen)

    def _operate(self, action: term.UseRecords) -> bool:
        if action.operation is term.Operation.PUBLISH_ENDPOINT:
            self.world.checks.after_claim(self)
        allowed = getattr(self.ledger, action.operation.value)(*action.subject) is not False
        if action.operation is term.Operation.TAKE and allowed:
            self.world.checks.after_take(self)
        return allowed

    @property
    def state(self) -> State:
        return self.term.membership
