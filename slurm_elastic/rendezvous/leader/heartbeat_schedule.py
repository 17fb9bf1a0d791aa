"""The times at which the leader asks agents for a heartbeat."""

from __future__ import annotations

from collections.abc import Collection

__all__ = ["HeartbeatSchedule"]

_AT_ONCE = 64
"""Agents whose answers may arrive together. Those of very many would keep the leader from anything else for a while."""


class HeartbeatSchedule:
    """Asks every agent once in an interval: few agents all together, so that an idle leader sleeps, many in turns.

    Args:
        interval: seconds between two signs of life of one agent.
        tick: seconds, at most, between two calls of :meth:`due`, which is the only clock here.
    """

    def __init__(self, interval: float, tick: float) -> None:
        self._interval = interval
        self._tick = tick
        self._most_turns = max(1, round(interval / tick))
        self._next = 0.0
        self._turn = 0

    def due(self, agents: Collection[str], now: float) -> list[str]:
        """Return those of `agents` that are to be asked now.

        An agent has the same turn whoever else comes and goes, so that none is passed over.
        """
        # No two ticks are exactly one interval apart: the one that comes nearest counts.
        if now < self._next - self._tick / 2:
            return []
        turns = max(1, min(len(agents) // _AT_ONCE, self._most_turns))
        self._next = max(self._next, now - self._tick / 2) + self._interval / turns
        self._turn = (self._turn + 1) % turns
        return [agent for agent in agents if hash(agent) % turns == self._turn]
