"""The times at which the leader asks agents for a heartbeat."""

from __future__ import annotations

import math
import zlib

_GROUPS = 64
_TOGETHER = 256
"""Agents whose answers may arrive together: 6 ms, in which the leader can do nothing else. With 64 it is awake four
times as often, and each heartbeat of 1,024 agents costs it a third more."""


class HeartbeatSchedule:
    """Makes each agent due once in an interval: few agents all together, so that an idle leader sleeps, many in groups.

    An agent stays in its group when others come and go, so that none is missed.

    Attributes:
        next_at: The time at which the next group is due.
    """

    def __init__(self) -> None:
        self.next_at = -math.inf
        self._groups: list[dict[str, None]] = [{} for _ in range(_GROUPS)]
        self._at = [-math.inf] * _GROUPS
        self._size = 0

    def add(self, agent: str) -> None:
        """Add an agent."""
        group = self._group(agent)
        self._size += agent not in group
        group[agent] = None

    def remove(self, agent: str) -> None:
        """Remove an agent."""
        group = self._group(agent)
        if agent in group:
            del group[agent]
            self._size -= 1

    def due(self, now: float, interval: float) -> list[str]:
        """Return the agents that are due now.

        Args:
            now: The time.
            interval: Seconds between two heartbeats of one agent.
        """
        turns = max(1, min(_GROUPS, self._size // _TOGETHER))
        # A leader that is awake already asks a little early, and sleeps on.
        latest = now + interval / turns / 4
        if latest < self.next_at:
            return []
        agents: list[str] = []
        for number, at in enumerate(self._at):
            if latest >= at:
                agents += self._groups[number]
                # The next moment of its own turn.
                phase = number % turns * interval / turns
                self._at[number] = now + interval if turns == 1 else latest + interval - (latest - phase) % interval
            else:
                # The interval, or the number of turns, may have become smaller.
                self._at[number] = min(at, now + interval)
        self.next_at = min(self._at)
        return agents

    def _group(self, agent: str) -> dict[str, None]:
        return self._groups[zlib.crc32(agent.encode(errors="surrogatepass")) % _GROUPS]
