"""A run with several possible leaders, in virtual time, and what must be true all the while."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slurm_elastic.rendezvous.membership import Reason, Table
from tests.simulation.checks import Violation
from tests.simulation.succession.party import Party
from tests.simulation.succession.wire import Records, Wire

if TYPE_CHECKING:
    from tests.simulation.succession.leading import Leading

__all__ = ["LEADER", "Fault", "World"]

LEADER = -1
"""Stands for the agent that leads when a fault happens."""

BOUND = 1.5
"""Seconds beyond the heartbeat limit after which workers of a round that was followed must have ended."""


@dataclass(frozen=True)
class Fault:
    """One thing that happens: kill, power, pause, leave, arrive, cut, break or disk."""

    at: float
    kind: str
    agent: int = 0
    seconds: float = 0.0
    side: tuple[int, ...] = ()


class Checks:
    """The truth about who trains."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.told: dict[int, Table] = {}
        self._started_at: dict[int, float] = {}

    def after_publish(self, leading: Leading, table: Table) -> None:
        """A leader tells its members of a round."""
        known = self.told.setdefault(table.round, table)
        if known is not table:
            raise Violation("a round is told once", f"round {table.round}: {known} and {table}")
        newer = [number for number in self.told if number > table.round]
        if newer and any(self._started_at.get(number) is not None for number in newer):
            self._world.tell("checks", f"round {table.round} is told late")

    def after_start(self, party: Party, table: Table) -> None:
        """An agent starts workers."""
        self._world.tell(party.name, f"starts workers of round {table.round}: {[p.agent for p in table.places]}")
        if self.told.get(table.round) != table:
            raise Violation("a table never changes", str(table))
        self._started_at.setdefault(table.round, self._world.now)
        self.look()

    def look(self) -> None:
        """At any moment."""
        rounds = {party.workers for party in self._world.parties.values() if party.workers is not None}
        whole = [number for number in sorted(rounds) if self._is_whole(number)]
        if len(whole) > 1:
            raise Violation("one group trains", f"rounds {whole} are whole")
        newest = max((number for number in self._started_at), default=-1)
        for party in self._world.parties.values():
            if party.workers is None or party.workers >= newest or party.paused or not party.alive:
                continue
            since = max(min(at for n, at in self._started_at.items() if n > party.workers), party_awake(party))
            if self._world.now > since + self._world.limit + BOUND:
                raise Violation("old workers end in time", f"{party.name} has workers of round {party.workers}")

    def _is_whole(self, number: int) -> bool:
        """Whether a round can take a step: that takes the workers of all its members."""
        members = [self._world.parties[place.agent] for place in self.told[number].places]
        return all(party.alive and party.workers == number for party in members)


def party_awake(party: Party) -> float:
    return getattr(party, "awake_since", 0.0)


class World:
    """One schedule.

    Attributes:
        limit: the heartbeat limit.
        story: what happened, if it is wanted.
    """

    def __init__(self, seed: int, agents: int, faults: list[Fault], story: list[str] | None = None) -> None:
        self.seed, self.story = seed, story
        self.rng = random.Random(f"{seed} world")
        self.now, self.limit = 0.0, 3.0
        self.records = Records()
        self.parties: dict[str, Party] = {}
        self.checks = Checks(self)
        self._heap: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._count = 0
        self._wires: list[Wire] = []
        self._cut: tuple[frozenset[str], ...] = ()
        self._slow_until = 0.0
        self._slowness = self.rng.choice((0.002, 0.02, 0.1))
        self._disk = self.rng.choice((0.005, 0.05))
        self._dead_since: dict[str, float] = {}
        self._nodes: dict[int, str] = {}
        self._incarnation = 0
        self._faults = faults
        for index in range(agents):
            self._arrive(index)
        first = self.parties[self._nodes[0]]
        first.lead(set(), Reason.START)

    # What others ask for.

    def at(self, moment: float, action: Callable[..., None], *arguments: object) -> None:
        self._count += 1
        heapq.heappush(self._heap, (moment, self._count, action, arguments))

    def tell(self, who: str, what: str) -> None:
        if self.story is not None:
            self.story.append(f"{self.now:9.3f}  {who:22} {what}")

    def delay(self) -> float:
        return self.rng.random() * (self._slowness if self.rng.random() < 0.95 else 0.5)

    def disk(self) -> float:
        slow = max(0.0, self._slow_until - self.now)
        return slow + self.rng.random() * (self._disk if self.rng.random() < 0.95 else 1.0)

    def connected(self, one: Party, other: Party) -> bool:
        return one is other or all((one.name in side) == (other.name in side) for side in self._cut)

    def carry_on(self) -> None:
        for wire in self._wires:
            wire.carry_on()

    def attempt(self, party: Party, name: str, tell: Callable[[str, Wire | None], None]) -> None:
        """Connect to an agent's chair."""
        other = self.parties[name]

        def arrive() -> None:
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
        for fault in self._faults:
            self.at(fault.at, self._happen, fault)
        self._play(max((fault.at + fault.seconds for fault in self._faults), default=0.0) + 0.001)
        self._cut = ()
        for party in self.parties.values():
            if party.paused:
                party.go_on()
        self.carry_on()
        if not [party for party in self.parties.values() if party.alive and not party.leaving]:
            self._arrive(0)
        deadline = self.now + 45.0
        while (question := self._unsettled()) and self.now < deadline:
            self._play(self.now + 0.2)
        if question:
            raise Violation("the run trains again", question)

    def _play(self, until: float) -> None:
        while self._heap and self._heap[0][0] <= until:
            self.now, _, action, arguments = heapq.heappop(self._heap)
            action(*arguments)
            self.checks.look()
        self.now = until

    def _unsettled(self) -> str:
        living = {party.name for party in self.parties.values() if party.alive and not party.leaving}
        rounds = {self.parties[name].workers for name in living}
        if len(rounds) != 1 or None in rounds:
            return f"rounds {rounds} of {sorted(living)}"
        (number,) = rounds
        assert number is not None
        members = {place.agent for place in self.checks.told[number].places}
        return "" if members == living else f"round {number} has {members}, {living} live"

    def _leader(self) -> int:
        newest = self.records.newest_epoch()
        record = self.records.epoch(newest) if newest is not None else None
        names = {name: index for index, name in self._nodes.items()}
        return names.get(str(record["agent"]), 0) if record is not None else 0

    def _arrive(self, index: int) -> None:
        self._incarnation += 1
        name = f"n{index}/7.0/{self._incarnation}"
        self._nodes[index] = name
        self.parties[name] = Party(self, name, f"n{index}", index)
        self.tell(name, "*** arrives")

    def _happen(self, fault: Fault) -> None:
        index = fault.agent if fault.agent != LEADER else self._leader()
        party = self.parties[self._nodes[index]]
        self.tell(party.name, f"*** {fault.kind} {fault.seconds:.3f} {fault.side}")
        match fault.kind:
            case "kill" | "power":
                self._dead_since.setdefault(party.name, self.now)
                party.end(silent=fault.kind == "power")
            case "pause" if party.alive and not party.paused:
                party.paused = True
                self.at(self.now + fault.seconds, self._go_on, party)
            case "leave" if party.alive:
                self._dead_since.setdefault(party.name, self.now)
                party.later(0.0, party.leave)
            case "arrive" if not party.alive:
                self._arrive(index)
            case "cut":
                side = frozenset(name for index, name in self._nodes.items() if index in fault.side)
                self._cut = (*self._cut, side)
                self.at(self.now + fault.seconds, self._heal, side)
            case "break" if party.alive and party.wire is not None:
                wire = party.wire
                party.later(0.0, party._drop)
                self.at(self.now, wire.carry_on)
            case "disk":
                self._slow_until = self.now + fault.seconds

    def _heal(self, side: frozenset[str]) -> None:
        self._cut = tuple(each for each in self._cut if each is not side)
        self.carry_on()

    def _go_on(self, party: Party) -> None:
        if party.paused:
            party.awake_since = self.now  # type: ignore[attr-defined]
            party.go_on()
