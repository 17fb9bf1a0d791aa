"""Connections between agents and the leader: in order within one direction, slow, and gone at any moment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from slurm_elastic.rendezvous.membership.assignment import Table

if TYPE_CHECKING:
    from tests.simulation.agents import SimulatedAgent
    from tests.simulation.world import World


@dataclass(frozen=True, slots=True)
class Hello:
    """First on a connection: whose it is. From here on the leader uses it, and no older one of this agent."""


@dataclass(frozen=True, slots=True)
class Welcome:
    """The leader knows the connection; from here on the agent uses it, and no older one."""


@dataclass(frozen=True, slots=True)
class Place:
    """The agent has a place in this table."""

    attempt: int
    table: Table


class _Closed:
    """Comes after the last message of a direction when the other end learns that the connection has ended."""


class _Direction:
    """What flows one way: nothing overtakes, and from `limit` on everything is lost."""

    __slots__ = ("arrived", "held", "last", "limit", "sent")

    def __init__(self) -> None:
        self.sent = 0
        self.arrived = 0
        self.last = 0.0
        self.limit: int | None = None
        self.held: list[tuple[int, object]] = []


class Connection:
    """One connection, made by an agent."""

    def __init__(self, world: World, agent: SimulatedAgent) -> None:
        self.world = world
        self.agent = agent
        self.ended = False
        self._up = _Direction()
        self._down = _Direction()

    def send_up(self, message: object) -> None:
        """From the agent to the leader."""
        self._send(self._up, message)

    def send_down(self, message: object) -> None:
        """From the leader to the agent."""
        self._send(self._down, message)

    def break_(self, *, noticed: bool) -> None:
        """End abruptly: what is on its way may be lost from any message on, in each direction."""
        if self.ended:
            return
        for direction in (self._up, self._down):
            direction.limit = self.agent.rng.randint(direction.arrived, direction.sent)
        self.ended = True
        self._end(self._down)
        if noticed:
            self._end(self._up)

    def close_by_agent(self) -> None:
        """End in order: all that the agent has said arrives."""
        if not self.ended:
            self.ended = True
            self._end(self._up)

    def close_by_leader(self) -> None:
        """End, as the leader has given up or replaced the connection."""
        if not self.ended:
            self.ended = True
            self._end(self._down)

    def go_silent(self) -> None:
        """The agent's node has no power: nobody learns anything."""
        self.ended = True

    def release(self) -> None:
        """The network carries again what it held back."""
        for direction in (self._up, self._down):
            held, direction.held = direction.held, []
            for number, message in held:
                self._arrive(direction, number, message)

    def _send(self, direction: _Direction, message: object) -> None:
        if self.ended:
            return
        number, direction.sent = direction.sent, direction.sent + 1
        self._carry(direction, number, message)
        rng = self.agent.rng
        if rng.random() < self.world.noise.doubled and not isinstance(message, Hello):
            self.world.at(direction.last + rng.random() * 0.3, self._arrive, direction, number, message)

    def _end(self, direction: _Direction) -> None:
        self._carry(direction, -1, _Closed())

    def _carry(self, direction: _Direction, number: int, message: object) -> None:
        rng, noise = self.agent.rng, self.world.noise
        longest = noise.late_delay if noise.late and rng.random() < noise.late else noise.delay
        direction.last = max(direction.last, self.world.now + rng.random() * longest)
        self.world.at(direction.last, self._arrive, direction, number, message)

    def _arrive(self, direction: _Direction, number: int, message: object) -> None:
        if self.agent.cut:
            direction.held.append((number, message))
            return
        if direction.limit is not None and number >= direction.limit:
            return
        direction.arrived = max(direction.arrived, number + 1)
        closed = isinstance(message, _Closed)
        if direction is self._up:
            self.world.leader.receive(self, None if closed else message)
        else:
            self.agent.receive(self, None if closed else message)
