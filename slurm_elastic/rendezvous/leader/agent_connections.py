"""The connections of a leader's agents, the messages sent on them, the times of heartbeats, and what was dropped."""

from __future__ import annotations

import logging
import math
import random
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from slurm_elastic.descriptors import connections_at_most
from slurm_elastic.rendezvous.membership.assignment import Table
from slurm_elastic.rendezvous.transport.connection import Connection
from slurm_elastic.rendezvous.transport.messages import Assignment, Heartbeat, LeaderMessage, encode
from slurm_elastic.rendezvous.transport.session import ForeignError, Session, SessionError
from slurm_elastic.text import printable

if TYPE_CHECKING:
    from slurm_elastic.rendezvous.leader.leader import Leader

_TURNS = 64
_TOGETHER = 256
"""Agents whose answers may arrive together: 6 ms, in which the leader can do nothing else."""


logger = logging.getLogger(__name__)

_GREETINGS = 1 << 17
"""Greetings that the leader remembers, in 13 MB: 100 of each of 1,300 agents."""


class AgentConnections:
    """The connections of one leader, at most one per agent.

    Attributes:
        shared: The newest round with assignments, and what is the same in all of them.
        by_agent: The connection of each agent that has proved its identity; those first that are asked next.
        beat_at: The time of the next heartbeats.
        pending: Connections of members of the run that have not proved their identity yet.
        drops, reject: Count what was dropped, and log it within bounds.
    """

    def __init__(self) -> None:
        self.drops = DropLog()
        self.reject = self.drops.add
        self.shared: tuple[Table, Assignment] | None = None
        self.beat_at = 0.0
        self.by_agent: dict[str, AcceptedConnection] = {}
        self.pending: set[AcceptedConnection] = set()
        self._coming: Counter[str] = Counter()
        self._greetings: dict[str, None] = {}
        self._most = connections_at_most()

    def room(self) -> int:
        """Return the number of connections for which there are descriptors beside those of members."""
        return self._most - len(self.by_agent) - len(self.pending)

    def refuses(self, agent: str, nonce: str) -> float | None:
        """Return the seconds after which an agent that has greeted is to connect again; None if there is room now.

        A new connection of a connected agent replaces the one that broke, so there is always room for it.

        Raises:
            ForeignError: A valid greeting with this random number has come before. Only members of the run make valid
                ones, so a stranger cannot make the leader forget one.
        """
        if nonce in self._greetings:
            raise ForeignError("a greeting that has come before")
        self._greetings[nonce] = None
        if len(self._greetings) > _GREETINGS:
            del self._greetings[next(iter(self._greetings))]
        if agent in self.by_agent or self.room() > 0:
            return None
        self.reject(
            "all addresses", f"an agent for now, as {self._most} connections are what the limit on open files allows"
        )
        # Random, so that the agents do not all connect together again.
        return random.uniform(1.0, 3.0)

    def opened(self, connection: AcceptedConnection) -> None:
        """Add a connection of a member of the run that has not proved its identity yet."""
        self.pending.add(connection)
        self._coming[connection.named] += 1

    def authenticated(self, connection: AcceptedConnection) -> None:
        """Make a connection the one of its agent, as it has proved its identity; close an older one."""
        self._arrived(connection)
        older = self.by_agent.get(connection.agent)
        self.by_agent[connection.agent] = connection
        if older is not None:
            older.close()

    def closed(self, connection: AcceptedConnection) -> bool:
        """Remove a connection that has ended. Return True if it was the one of its agent."""
        self._arrived(connection)
        if not self.current(connection):
            return False
        del self.by_agent[connection.agent]
        return True

    def has(self, agent: str) -> bool:
        """Return True if this agent is connected, or has greeted."""
        return agent in self.by_agent or agent in self._coming

    def current(self, connection: AcceptedConnection) -> bool:
        """Return whether this is the one connection of its agent."""
        return self.by_agent.get(connection.agent) is connection

    def send(self, agents: Sequence[str], message: LeaderMessage) -> None:
        """Send a message to those of the agents that are connected."""
        content = encode(message)
        for agent in agents:
            if agent in self.by_agent:
                self.by_agent[agent].send(content)

    def others(self, agents: Sequence[str]) -> tuple[str, ...]:
        """Return the other connected peers: coordinators that wait, clients, agents that have not joined."""
        return tuple(self.by_agent.keys() - set(agents))

    def beat(self, now: float, heartbeat_limit: float) -> None:
        """Send a heartbeat to the agents that are due; each answers with its own.

        Each is due once in a third of the limit: few all together, so that an idle leader sleeps, many in turns.
        """
        interval, size = heartbeat_limit / 3, len(self.by_agent)
        turns = max(1, min(_TURNS, size // _TOGETHER))
        pause, at = interval / turns, min(self.beat_at, now + interval)
        # A leader that is awake already asks a little early, and sleeps on; one that is late makes up for turns.
        late = now + pause / 4 - at
        if late < 0:
            return
        due = min(turns, 1 + late // pause)
        self.beat_at = at + due * pause if due < turns else now + pause
        beat = encode(Heartbeat(heartbeat_limit))
        # In the order in which they were asked last, so none is passed over when others come and go.
        for agent in [*islice(self.by_agent, math.ceil(size * due / turns))]:
            connection = self.by_agent[agent] = self.by_agent.pop(agent)
            connection.send(beat)

    def _arrived(self, connection: AcceptedConnection) -> None:
        """Remove a connection from the pending ones: it has proved its identity, or has ended."""
        if connection in self.pending:
            self.pending.remove(connection)
            self._coming[connection.named] -= 1
            if not self._coming[connection.named]:
                del self._coming[connection.named]

    def drop(self, agent: str) -> None:
        """End the connection of an agent. An agent that lives connects again, and learns that its round is over."""
        if agent in self.by_agent:
            self.by_agent.pop(agent).close()

    def close(self) -> None:
        """End all connections."""
        for connection in [*self.by_agent.values(), *self.pending]:
            connection.close()


_HANDSHAKE_TIMEOUT = 20.0
"""Seconds in which a member of the run has to prove its identity; it gives up earlier itself (connection.py)."""


class AcceptedConnection(Connection):
    """The listening end of a connection of a member of the run.

    Attributes:
        named: The agent that the greeting names.
        agent: The agent that the other end has proved to be, empty before.
    """

    def __init__(self, leader: Leader, session: Session, peer: str, stream: socket.socket) -> None:
        super().__init__(session, stream)
        self._leader, self.peer = leader, peer
        self.named = session.agent
        self.agent = ""
        self._deadline = self._loop.call_later(_HANDSHAKE_TIMEOUT, self._too_slow)
        leader.opened(self)

    def _received(self, data: bytes) -> None:
        try:
            messages, _ = self.session.receive(data)
        except SessionError as error:
            self._leader.connections.reject(self.peer, str(error))
            self.close()
            return
        if not self.agent and self.session.established:
            self._deadline.cancel()
            self.agent = self.session.agent
            self._leader.connections.authenticated(self)
        for message in messages:
            self._leader.received(self, message)

    def _ended(self) -> None:
        self._deadline.cancel()
        self._leader.closed(self)

    def _too_slow(self) -> None:
        self._leader.connections.reject(self.peer, "a handshake that was never completed")
        self.abort()


_ADDRESSES = 256
"""Addresses of which the first drop is logged."""
_LINES = 4
"""Lines per minute."""
_MINUTE = 60.0


class Ration:
    """Lines of a log that may come very often: at most `lines` of them in a minute.

    Args:
        clock: Returns the time in seconds.
    """

    def __init__(self, lines: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._most, self._clock = lines, clock
        self._minute, self._lines, self._left_out = -_MINUTE, 0, 0

    def take(self) -> int | None:
        """Return the number of lines left out since the last one; None if this one is left out, too."""
        now = self._clock()
        if now >= self._minute + _MINUTE:
            self._minute, self._lines = now, 0
        if self._lines >= self._most:
            self._left_out += 1
            return None
        self._lines += 1
        left_out, self._left_out = self._left_out, 0
        return left_out


class DropLog:
    """Counts drops, and logs the first of each address, within bounds.

    Args:
        clock: Returns the time in seconds.

    Attributes:
        count: Number of drops.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.count = 0
        self._addresses: set[str] = set()
        self._ration = Ration(_LINES, clock)

    def add(self, peer: str, why: str) -> None:
        """Count a drop, and log it if it is the first of its address and this minute has room for a line.

        `why` is what was dropped, as in "a frame with a wrong code".
        """
        self.count += 1
        if peer in self._addresses or len(self._addresses) >= _ADDRESSES:
            return
        self._addresses.add(peer)
        left_out = self._ration.take()
        if left_out is not None:
            more = f"; {left_out} more addresses since the last line" if left_out else ""
            logger.warning("dropped %s from %s (logged once%s)", printable(why), printable(peer), more)
