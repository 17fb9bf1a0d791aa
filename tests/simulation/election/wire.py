"""Connections between agents, and what becomes of them when a network is cut, a process paused or killed."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.simulation.election.agent import Agent
    from tests.simulation.election.world import World


class Closed:
    """Comes last over a wire: the other end has closed it, or its process has ended."""


class Wire:
    """One connection from a member to a leader. Nothing overtakes; what cannot be carried now is carried later.

    Its ends are named: an agent that leads is a member of its own, with both ends in one process.

    Attributes:
        number: by which the member's machine knows it, once it does.
        lost: whether the member has been told that the leader closed it.
    """

    def __init__(self, world: World, member: Agent, leader: Agent, epoch: int) -> None:
        self.world, self.member, self.leader, self.epoch = world, member, leader, epoch
        self.served_by = leader.leader
        self.lost = False
        self.number = -1
        self._closed = {"up": False, "down": False}
        self._held: dict[str, list[object]] = {"up": [], "down": []}
        self._last = {"up": 0.0, "down": 0.0}

    def send_up(self, message: object) -> None:
        """From the member to the leader."""
        if not self._closed["up"]:
            self._carry("up", message)

    def send_down(self, message: object) -> None:
        """From the leader to the member."""
        if not self._closed["down"]:
            self._carry("down", message)

    def close_by_member(self, *, told: bool = True) -> None:
        """The member closes its end; the leader hears of it when the network lets it, or never."""
        self._close("up", told)

    def close_by_leader(self, *, told: bool = True) -> None:
        """The same the other way."""
        self._close("down", told)

    def carry_on(self) -> None:
        """Deliver what was held back, as far as that is possible now."""
        for way, held in self._held.items():
            waiting, held[:] = held[:], []
            for message in waiting:
                self._carry(way, message)

    def _close(self, way: str, told: bool) -> None:
        if not self._closed[way]:
            self._closed[way] = True
            if told:
                self._carry(way, Closed())

    def _carry(self, way: str, message: object) -> None:
        self._last[way] = max(self._last[way], self.world.now + self.world.delay())
        self.world.at(self._last[way], self._arrive, way, message)

    def _arrive(self, way: str, message: object) -> None:
        self.world.before_message(self.leader)
        receiver = self.leader if way == "up" else self.member
        if not receiver.alive or self._closed["down" if way == "up" else "up"]:
            return
        if receiver.paused or self._held[way] or not self.world.connected(self.member, self.leader):
            self._held[way].append(message)
        elif way == "up":
            receiver.hear_member(self, message)
        else:
            self.lost = self.lost or isinstance(message, Closed)
            receiver.hear_leader(self, message)
