"""The connections of a leader's agents, and what is sent on them."""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

from slurm_elastic.descriptors import connections_at_most
from slurm_elastic.rendezvous.leader.heartbeat_schedule import HeartbeatSchedule
from slurm_elastic.rendezvous.membership import Table
from slurm_elastic.rendezvous.transport.drop_log import DropLog
from slurm_elastic.rendezvous.transport.messages import Beat, LeaderMessage, encode
from slurm_elastic.rendezvous.transport.server_connection import AcceptedConnection

__all__ = ["AgentConnections"]

logger = logging.getLogger(__name__)

_GREETINGS = 1 << 17
"""Greetings that are remembered, in 13 MB: 100 of each of 1,300 agents."""


class AgentConnections:
    """The connections of one leader, at most one per agent.

    Attributes:
        rejected: how many records were dropped, by the address that they came from.
        told: the newest round of which agents were told, and what all of them were told alike.
        schedule: of the heartbeats.
    """

    def __init__(self) -> None:
        self._drops = DropLog(logger)
        self.rejected: Counter[str] = self._drops.counts
        self.told: tuple[Table, Any] | None = None
        self.schedule = HeartbeatSchedule()
        self._connections: dict[str, AcceptedConnection] = {}
        self._on_their_way: set[AcceptedConnection] = set()
        self._greetings: dict[str, None] = {}
        self._coming: Counter[str] = Counter()
        self._most = connections_at_most()

    def __len__(self) -> int:
        return len(self._connections)

    def room(self) -> int:
        """Connections for which there is room beside those of members."""
        return self._most - len(self._connections) - len(self._on_their_way)

    def busy(self, agent: str) -> float | None:
        """Seconds after which an agent that is not here yet is to come again; None if there is room for it now.

        An agent whose connection broke takes the place of that connection, so there is always room for it.
        """
        if agent in self._connections or self.room() > 0:
            return None
        self.reject(
            "all addresses", f"an agent for now, as {self._most} connections are what the limit on open files allows"
        )
        # At different times, so that they do not all come together again.
        return random.uniform(1.0, 3.0)

    def repeated(self, nonce: str) -> bool:
        """Return whether a valid greeting with this random number has come before, and remember it.

        Only members of the run make valid greetings, so a stranger cannot make the leader forget one.
        """
        if nonce in self._greetings:
            return True
        self._greetings[nonce] = None
        if len(self._greetings) > _GREETINGS:
            del self._greetings[next(iter(self._greetings))]
        return False

    def opened(self, connection: AcceptedConnection) -> None:
        """A member of the run has connected, and has not proved yet which one it is."""
        self._on_their_way.add(connection)
        self._coming[connection.named] += 1

    def authenticated(self, connection: AcceptedConnection) -> None:
        """A connection has proved whose it is; an older one of the same agent is of no more use."""
        self._arrived(connection)
        older = self._connections.get(connection.agent)
        self._connections[connection.agent] = connection
        self.schedule.add(connection.agent)
        if older is not None:
            older.close()

    def closed(self, connection: AcceptedConnection) -> bool:
        """A connection has ended. Returns whether that was the one of its agent."""
        self._arrived(connection)
        if not self.current(connection):
            return False
        self._remove(connection.agent)
        return True

    def has(self, agent: str) -> bool:
        """Return whether this agent is connected, or on its way."""
        return agent in self._connections or agent in self._coming

    def origin(self, agent: str) -> str:
        """Return the address that this agent has connected from; empty if it is not connected."""
        connection = self._connections.get(agent)
        # So Linux names an address of IPv4 on a listener for both (ipv6(7)).
        return connection.peer.removeprefix("::ffff:") if connection is not None else ""

    def current(self, connection: AcceptedConnection) -> bool:
        """Return whether this is the one connection of its agent."""
        return self._connections.get(connection.agent) is connection

    def reject(self, peer: str, why: str) -> None:
        """Count what was dropped, and log it within bounds."""
        self._drops.add(peer, why)

    def send(self, agents: Sequence[str], message: LeaderMessage) -> None:
        """Say this to those of the agents that are connected."""
        content = encode(message)
        for agent in agents:
            if agent in self._connections:
                self._connections[agent].send(content)

    def others(self, agents: Sequence[str]) -> tuple[str, ...]:
        """Name those that are connected beside these: coordinators that wait, clients, agents that have not joined."""
        return tuple(self._connections.keys() - set(agents))

    def beat(self, now: float, heartbeat_limit: float) -> None:
        """Ask those whose turn it is for a sign of life."""
        agents = self.schedule.due(now, heartbeat_limit / 3)
        # Every agent answers with a sign of its own.
        beat = encode(Beat(heartbeat_limit)) if agents else b""
        for agent in agents:
            self._connections[agent].send(beat)

    def _arrived(self, connection: AcceptedConnection) -> None:
        """A connection is on its way no more."""
        if connection in self._on_their_way:
            self._on_their_way.remove(connection)
            self._coming[connection.named] -= 1
            if not self._coming[connection.named]:
                del self._coming[connection.named]

    def _remove(self, agent: str) -> AcceptedConnection:
        self.schedule.remove(agent)
        return self._connections.pop(agent)

    def drop(self, agent: str) -> None:
        """End the connection of an agent. If it lives, it connects again, and is told that its round is over."""
        if agent in self._connections:
            self._remove(agent).close()

    def close(self) -> None:
        """End all connections."""
        for connection in [*self._connections.values(), *self._on_their_way]:
            connection.close()
