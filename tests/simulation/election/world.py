"""A run with several possible leaders, in virtual time, and what must be true once everything is healed."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

from slurm_elastic.rendezvous.election.leader_location import Answer
from tests.simulation.election.agent import Agent
from tests.simulation.election.checks import Checks
from tests.simulation.election.faults import LEADER, Fault, Script
from tests.simulation.election.leader import Leader
from tests.simulation.election.records import Records
from tests.simulation.election.wire import Wire
from tests.simulation.violation import Violation
from tests.simulation.virtual import Time

Tell = Callable[[Answer | None, Wire | None], None]

CONNECT, HANDSHAKE = 1.0, 3.0
"""Seconds after which an attempt to connect is given up: without any answer, and half open."""


class World(Time):
    """One schedule.

    Attributes:
        limit: the heartbeat limit.
        dead_since: when each agent ended, or began to leave.
        slow_until: until when the records are slow.
        messages: how many have been under way so far; what is done with the records counts twice.
        answers: for each answer of the records to a leader, the first message before which it can be lost.
        unusable: see Script.
    """

    def __init__(self, script: Script, transcript: list[str] | None = None) -> None:
        super().__init__(transcript)
        self.seed = script.seed
        self.rng = random.Random(f"{script.seed} world")
        self.limit = 3.0
        self.records = Records()
        self.unusable = script.unusable
        self.agents: dict[str, Agent] = {}
        self.checks = Checks(self)
        self.messages = 0
        self.answers: dict[tuple[Leader, int], int] = {}
        self._wires: list[Wire] = []
        self._cut: tuple[frozenset[str], ...] = ()
        self.slow_until = 0.0
        self._slowness = self.rng.choice((0.002, 0.02, 0.1))
        self._disk = self.rng.choice((0.005, 0.05))
        self.dead_since: dict[str, float] = {}
        self._nodes: dict[int, str] = {}
        self._incarnation = 0
        self._timed = [fault for fault in script.faults if not fault.message]
        self._late = script.late
        self._struck = {fault.message: fault for fault in script.faults if fault.message}
        self._busy_until = 0.0
        self._silences: list[tuple[float, float]] = []
        late = dict(self._late)
        for index in range(script.agents):
            if index not in late:
                self._arrive(index, trains=index > 0 or not script.store, founder=index == 0)
        for index, moment in self._late:
            self.at(moment, self._arrive, index)

    # What others ask for.

    def delay(self) -> float:
        """How long a message takes."""
        return self.rng.random() * (self._slowness if self.rng.random() < 0.95 else 0.5)

    def disk(self) -> float:
        """How long it takes until something is done with the records, or its result is known."""
        slow = max(0.0, self.slow_until - self.now)
        return slow + self.rng.random() * (self._disk if self.rng.random() < 0.95 else 1.0)

    def connected(self, one: Agent, other: Agent) -> bool:
        """Whether the network carries anything between them."""
        return one is other or all((one.name in side) == (other.name in side) for side in self._cut)

    def carry_on(self) -> None:
        """Something is connected again, or goes on."""
        for wire in self._wires:
            wire.carry_on()

    def before_message(self, leader: Agent) -> None:
        """Another message arrives, or something is done with the records: a fault may strike right now."""
        self.messages += 1
        if leader.leader is not None:
            self.answers.setdefault((leader.leader, leader.leader.answers), self.messages)
        fault = self._struck.pop(self.messages, None)
        if fault is not None:
            self._happen(fault, leader)

    def longest_silence(self) -> float:
        """For how long anything was paused, cut, half open or slow to read without a break, by now or lately."""
        longest = 0.0
        begin = end = -math.inf
        for since, until in sorted(self._silences):
            if since > end:
                begin = since
            end = max(end, until)
            if end > self.now - 20.0:
                longest = max(longest, min(end, self.now) - begin)
        return longest

    def attempt(self, agent: Agent, name: str, timeout: float | None, tell: Tell) -> None:
        """Connect to an agent.

        A node that cannot be reached does not answer. A process that is paused, or whose answer is lost, leaves the
        connection half open: its kernel has accepted it.
        """
        other = self.agents[name]
        answered = False

        def answer(kind: Answer | None, wire: Wire | None) -> None:
            nonlocal answered
            if not answered:
                answered = True
                tell(kind, wire)
            elif wire is not None:
                wire.close_by_member()

        def fail_within(seconds: float) -> None:
            seconds = min(seconds, timeout or seconds)
            agent.later(seconds, lambda: answer(Answer.SILENT, None))
            if other.leader is not None:
                # To this agent the leader is silent until the attempt is given up, however soon it could answer again.
                self._silences.append((self.now, self.now + seconds))

        def arrive() -> None:
            self.before_message(other)
            if not self.connected(agent, other) or (not other.alive and not other.refuses):
                fail_within(CONNECT)
            elif not other.alive:
                agent.later(self.delay(), lambda: answer(Answer.ENDED, None))
            else:
                if other.paused:
                    fail_within(HANDSHAKE)
                other.do(serve)

        def serve() -> None:
            leader = other.leader
            wire = None
            if leader is not None:
                wire = Wire(self, agent, other, leader.epoch)
                self._wires.append(wire)
                leader.accept(wire)
            self.at(self.now + self.delay(), come_back, wire)

        def come_back(wire: Wire | None) -> None:
            if self.connected(agent, other):
                agent.do(lambda: answer(Answer.IDLE if wire is None else None, wire))
            else:
                fail_within(HANDSHAKE)

        self.at(self.now + self.delay(), arrive)

    def probe(self, asker: Agent, names: Sequence[str]) -> tuple[frozenset[str], bool]:
        """Which of these agents have ended by the word of their nodes, and whether the node of any does not answer."""
        others = [self.agents[name] for name in names]
        reached = [other for other in others if self.connected(asker, other)]
        ended = frozenset(other.name for other in reached if not other.alive and other.refuses)
        return ended, len(reached) < len(others) or any(not other.alive and not other.refuses for other in reached)

    def slurm_knows(self, name: str) -> bool:
        """Whether Slurm knows that an agent is gone."""
        return not self.agents[name].alive and self.now > self.dead_since[name] + 8.0

    # What happens.

    def run(self) -> None:
        """Play the schedule, heal everything, and see that the run trains again with all that live.

        Raises:
            Violation: a promise is broken.
        """
        for fault in self._timed:
            self.at(fault.at, self._happen, fault, None)
            self._busy_until = max(self._busy_until, fault.at + fault.seconds)
        self._busy_until = max([self._busy_until, *(moment for _, moment in self._late)])
        question = "it has not begun"
        while question:
            while self.now <= self._busy_until:
                self.play(self._busy_until + 0.001)
            self._heal_all()
            deadline = self.now + 45.0
            while (question := self._unsettled()) and self.now < deadline and self.now > self._busy_until:
                self.play(self.now + 0.2)
            if question and self.now >= deadline:
                raise Violation("the run trains again", question)

    def _unsettled(self) -> str:
        living = {each.name for each in self.agents.values() if each.alive and each.trains and not each.leaving}
        if not living:
            self._arrive(0)
            return "nobody is left"
        rounds = {self.agents[name].workers for name in living}
        if self.unusable:
            # Others are spares, and too few wait for more. A script that has never worked fails again and again.
            rounds -= {None}
            usable = set(range(1, len(living) + 1)) - self.unusable
            healthy = usable and any(self.agents[name].has_stepped for name in living)
            steps = len(rounds) == 1 and any(self.agents[name].stepped for name in living)
            return "" if steps or not healthy else f"rounds {rounds} of {sorted(living)}, which can use {usable}"
        if len(rounds) != 1 or None in rounds:
            return f"rounds {rounds} of {sorted(living)}"
        (number,) = rounds
        assert number is not None
        members = {place.agent for place in self.checks.told[number].places}
        return "" if members == living else f"round {number} has {members}, {living} live"

    def _leader(self) -> Agent:
        """Who has the newest epoch."""
        newest = self.records.newest_epoch()
        record = self.records.epoch(newest) if newest is not None else None
        return self.agents[str(record["agent"]) if record is not None else self._nodes[0]]

    def _arrive(self, index: int, *, trains: bool = True, founder: bool = False) -> None:
        self._incarnation += 1
        name = f"n{index}/7.0/{self._incarnation}"
        self._nodes[index] = name
        self.agents[name] = Agent(self, name, f"n{index}", index, trains=trains, founder=founder)
        self.tell(name, "*** arrives")
        self.agents[name].start()

    def _happen(self, fault: Fault, leader: Agent | None) -> None:
        agent = leader
        if agent is None:
            if fault.agent != LEADER and fault.agent not in self._nodes:
                return
            agent = self._leader() if fault.agent == LEADER else self.agents[self._nodes[fault.agent]]
        self.tell(agent.name, f"*** {fault}")
        self._busy_until = max(self._busy_until, self.now + fault.seconds)
        if fault.kind in ("pause", "cut", "disk"):
            self._silences.append((self.now, self.now + fault.seconds))
        match fault.kind:
            case "kill" | "power":
                agent.end(silent=fault.kind == "power")
            case "pause" if agent.alive and not agent.paused:
                agent.pause()
                self.at(self.now + fault.seconds, self._go_on, agent)
            case "leave" if agent.alive:
                self.dead_since.setdefault(agent.name, self.now)
                agent.later(0.0, lambda: agent.leave(fault.seconds))
            case "arrive" if not self.agents[self._nodes[agent.position]].alive:
                self._arrive(agent.position, trains=agent.trains)
            case "cut":
                side = frozenset(name for index, name in self._nodes.items() if index in fault.side)
                self._cut = (*self._cut, side)
                self.at(self.now + fault.seconds, self._heal, side)
            case "fail" if agent.alive:
                self.checks.failures += 1
                agent.later(0.0, agent.fail)
            case "break" if agent.alive:
                agent.later(0.0, agent.break_link)
            case "lose" if agent.leader is not None:
                agent.leader.loses_answer = True
            case "disk":
                self.slow_until = self.now + fault.seconds

    def _heal(self, side: frozenset[str]) -> None:
        self._cut = tuple(each for each in self._cut if each is not side)
        self.carry_on()

    def _heal_all(self) -> None:
        self._cut = ()
        for agent in [*self.agents.values()]:
            if agent.paused:
                agent.go_on()
        self.carry_on()

    def _go_on(self, agent: Agent) -> None:
        if agent.paused:
            agent.go_on()
