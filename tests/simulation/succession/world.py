"""A run with several possible leaders, in virtual time, and what must be true once everything is healed."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable

from slurm_elastic.rendezvous.membership import Reason
from tests.simulation.succession.checks import Checks
from tests.simulation.succession.faults import LEADER, Fault, Script
from tests.simulation.succession.party import Party
from tests.simulation.succession.records import Records
from tests.simulation.succession.wire import Wire
from tests.simulation.violation import Violation

__all__ = ["World"]


class World:
    """One schedule.

    Attributes:
        limit: the heartbeat limit.
        slow_until: until when the records are slow.
        messages: how many have been under way so far; what is done with the records counts twice.
        story: what happened, if it is wanted.
    """

    def __init__(self, script: Script, story: list[str] | None = None) -> None:
        self.seed, self.story = script.seed, story
        self.rng = random.Random(f"{script.seed} world")
        self.now, self.limit = 0.0, 3.0
        self.records = Records()
        self.parties: dict[str, Party] = {}
        self.checks = Checks(self)
        self.messages = 0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._count = 0
        self._wires: list[Wire] = []
        self._cut: tuple[frozenset[str], ...] = ()
        self.slow_until = 0.0
        self._slowness = self.rng.choice((0.002, 0.02, 0.1))
        self._disk = self.rng.choice((0.005, 0.05))
        self._dead_since: dict[str, float] = {}
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
                self._arrive(index, trains=index > 0 or not script.store)
        for index, moment in self._late:
            self.at(moment, self._arrive, index)
        first = self.parties[self._nodes[0]]
        first.search.lead(set(), Reason.START)

    # What others ask for.

    def at(self, moment: float, action: Callable[..., None], *arguments: object) -> None:
        """Do something at a moment of virtual time."""
        self._count += 1
        heapq.heappush(self._heap, (moment, self._count, action, arguments))

    def tell(self, who: str, what: str) -> None:
        """Add a line to the story."""
        if self.story is not None:
            self.story.append(f"{self.now:9.3f}  {who:22} {what}")

    def delay(self) -> float:
        """How long a message takes."""
        return self.rng.random() * (self._slowness if self.rng.random() < 0.95 else 0.5)

    def disk(self) -> float:
        """How long it takes until something is done with the records, or its result is known."""
        slow = max(0.0, self.slow_until - self.now)
        return slow + self.rng.random() * (self._disk if self.rng.random() < 0.95 else 1.0)

    def connected(self, one: Party, other: Party) -> bool:
        """Whether the network carries anything between them."""
        return one is other or all((one.name in side) == (other.name in side) for side in self._cut)

    def carry_on(self) -> None:
        """Something is connected again, or goes on."""
        for wire in self._wires:
            wire.carry_on()

    def before_message(self, leader: Party) -> None:
        """Another message arrives, or something is done with the records: a fault may strike right now."""
        self.messages += 1
        fault = self._struck.pop(self.messages, None)
        if fault is not None:
            self._happen(fault, leader)

    def longest_silence(self) -> float:
        """For how long anything was paused, cut or slow to read without a break, by now or in the last seconds."""
        longest = 0.0
        begin = end = -math.inf
        for since, until in sorted(self._silences):
            if since > end:
                begin = since
            end = max(end, until)
            if end > self.now - 20.0:
                longest = max(longest, min(end, self.now) - begin)
        return longest

    def attempt(self, party: Party, name: str, tell: Callable[[str, Wire | None], None]) -> None:
        """Connect to an agent's chair."""
        other = self.parties[name]

        def arrive() -> None:
            self.before_message(other)
            if (
                not self.connected(party, other)
                or (other.alive and other.paused)
                or (not other.alive and not other.refuses)
            ):
                party.later(1.0, lambda: tell("silent", None))
            elif not other.alive:
                party.later(self.delay(), lambda: tell("ended", None))
            elif other.leading is None:
                party.later(self.delay(), lambda: tell("idle", None))
            else:
                wire = Wire(self, party, other, other.leading.epoch)
                self._wires.append(wire)
                other.leading.accept(wire)
                party.later(self.delay(), lambda: tell("leads", wire))

        self.at(self.now + self.delay(), arrive)

    def has_ended(self, asker: Party, name: str) -> bool:
        """Whether it can be known there that an agent has ended: by its node's refusal, or by Slurm's word."""
        party = self.parties[name]
        if party.alive:
            return False
        return (party.refuses and self.connected(asker, party)) or self.now > self._dead_since[name] + 8.0

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
                self._play(self._busy_until + 0.001)
            self._heal_all()
            deadline = self.now + 45.0
            while (question := self._unsettled()) and self.now < deadline and self.now > self._busy_until:
                self._play(self.now + 0.2)
            if question and self.now >= deadline:
                raise Violation("the run trains again", question)

    def _play(self, until: float) -> None:
        heap = self._heap
        while heap and heap[0][0] <= until:
            self.now, _, action, arguments = heapq.heappop(heap)
            action(*arguments)
        self.now = until

    def _unsettled(self) -> str:
        living = {each.name for each in self.parties.values() if each.alive and each.trains and not each.leaving}
        if not living:
            self._arrive(0)
            return "nobody is left"
        rounds = {self.parties[name].workers for name in living}
        if len(rounds) != 1 or None in rounds:
            return f"rounds {rounds} of {sorted(living)}"
        (number,) = rounds
        assert number is not None
        members = {place.agent for place in self.checks.told[number].places}
        return "" if members == living else f"round {number} has {members}, {living} live"

    def _leader(self) -> Party:
        """Who has the newest epoch."""
        newest = self.records.newest_epoch()
        record = self.records.epoch(newest) if newest is not None else None
        return self.parties[str(record["agent"]) if record is not None else self._nodes[0]]

    def _arrive(self, index: int, *, trains: bool = True) -> None:
        self._incarnation += 1
        name = f"n{index}/7.0/{self._incarnation}"
        self._nodes[index] = name
        self.parties[name] = Party(self, name, f"n{index}", index, trains=trains)
        self.tell(name, "*** arrives")

    def _happen(self, fault: Fault, leader: Party | None) -> None:
        party = leader
        if party is None:
            if fault.agent != LEADER and fault.agent not in self._nodes:
                return
            party = self._leader() if fault.agent == LEADER else self.parties[self._nodes[fault.agent]]
        self.tell(party.name, f"*** {fault}")
        self._busy_until = max(self._busy_until, self.now + fault.seconds)
        if fault.kind in ("pause", "cut", "disk"):
            self._silences.append((self.now, self.now + fault.seconds))
        match fault.kind:
            case "kill" | "power":
                self._dead_since.setdefault(party.name, self.now)
                party.end(silent=fault.kind == "power")
            case "pause" if party.alive and not party.paused:
                party.pause()
                self.at(self.now + fault.seconds, self._go_on, party)
            case "leave" if party.alive:
                self._dead_since.setdefault(party.name, self.now)
                party.later(0.0, lambda: party.leave(fault.seconds))
            case "arrive" if not self.parties[self._nodes[party.position]].alive:
                self._arrive(party.position, trains=party.trains)
            case "cut":
                side = frozenset(name for index, name in self._nodes.items() if index in fault.side)
                self._cut = (*self._cut, side)
                self.at(self.now + fault.seconds, self._heal, side)
            case "fail" if party.alive:
                self.checks.failures += 1
                party.later(0.0, party.fail)
            case "break" if party.alive and party.wire is not None:
                wire = party.wire
                party.later(0.0, lambda: party.drop(wire))
            case "disk":
                self.slow_until = self.now + fault.seconds

    def _heal(self, side: frozenset[str]) -> None:
        self._cut = tuple(each for each in self._cut if each is not side)
        self.carry_on()

    def _heal_all(self) -> None:
        self._cut = ()
        for party in [*self.parties.values()]:
            if party.paused:
                party.go_on()
        self.carry_on()

    def _go_on(self, party: Party) -> None:
        if party.paused:
            party.go_on()
