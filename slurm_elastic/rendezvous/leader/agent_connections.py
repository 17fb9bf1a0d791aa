"""Who is connected to a leader, and what is said to them."""

from __future__ import annotations

import logging
import resource
from collections import Counter
from collections.abc import Sequence

from slurm_elastic.rendezvous.leader.heartbeat_schedule import Beats
from slurm_elastic.rendezvous.leave_requests import LeaveAnswer
from slurm_elastic.rendezvous.transport.messages import Beat, LeaderMessage, encode
from slurm_elastic.rendezvous.transport.server_connection import AcceptedConnection

__all__ = ["Peers"]

logger = logging.getLogger(__name__)

_BEAT = encode(Beat())


class Peers:
    """The connections of one leader, at most one per agent.

    Attributes:
        rejected: how many records were dropped, by the address that they came from.
    """

    def __init__(self, beats: Beats) -> None:
        self.rejected: Counter[str] = Counter()
        self._beats = beats
        self._connections: dict[str, AcceptedConnection] = {}
        self._anonymous: dict[AcceptedConnection, None] = {}
        self._room = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4

    def __len__(self) -> int:
        return len(self._connections)

    def opened(self, connection: AcceptedConnection) -> None:
        """A connection was made by somebody who has proved nothing yet."""
        self._anonymous[connection] = None
        if len(self._anonymous) > self._room:
            # The process needs descriptors for itself and its workers, whoever holds how many connections open.
            oldest = next(iter(self._anonymous))
            self.reject(oldest, "one of too many connections of nobody known")
            del self._anonymous[oldest]
            oldest.close()

    def authenticated(self, connection: AcceptedConnection) -> None:
        """A connection has proved whose it is; an older one of the same agent is of no more use."""
        self._anonymous.pop(connection, None)
        older = self._connections.get(connection.agent)
        self._connections[connection.agent] = connection
        if older is not None:
            older.close()

    def closed(self, connection: AcceptedConnection) -> bool:
        """A connection has ended. Returns whether that was the one of its agent."""
        self._anonymous.pop(connection, None)
        if not self.current(connection):
            return False
        del self._connections[connection.agent]
        return True

    def current(self, connection: AcceptedConnection) -> bool:
        """Whether this is the one connection of its agent."""
        return self._connections.get(connection.agent) is connection

    def reject(self, connection: AcceptedConnection, why: str) -> None:
        """Count what was dropped; log each kind once per peer."""
        self.rejected[connection.peer] += 1
        if self.rejected[connection.peer] == 1:
            logger.warning("dropped %s from %s (logged once)", why, connection.peer)

    def send(self, agents: Sequence[str], message: LeaderMessage | LeaveAnswer) -> None:
        """Say this to those of the agents that are connected."""
        content = encode(message)
        for agent in agents:
            if agent in self._connections:
                self._connections[agent].send(content)

    def others(self, agents: Sequence[str]) -> tuple[str, ...]:
        """Who is connected beside these agents: a store that waits, who asks for something, who has not joined yet."""
        return tuple(self._connections.keys() - set(agents))

    def beat(self, now: float) -> None:
        """Ask those whose turn it is for a sign of life."""
        # Every agent answers with a sign of its own.
        for agent in self._beats.due(self._connections, now):
            self._connections[agent].send(_BEAT)

    def drop(self, agent: str) -> None:
        """End the connection of an agent. If it lives, it connects again, and is told that its round is over."""
        if agent in self._connections:
            self._connections.pop(agent).close()

    def close(self) -> None:
        """End all connections."""
        for connection in [*self._connections.values(), *self._anonymous]:
            connection.close()
