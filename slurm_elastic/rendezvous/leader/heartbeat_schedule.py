"""The times at which the leader asks agents for a heartbeat."""

from __future__ import annotations

import math
import zlib

__all__ = ["HeartbeatSchedule"]

_GROUPS = 64
_TOGETHER = 64
"""Agents whose answers may arrive together. Those of very many would keep the leader from anything else for a while."""


class HeartbeatSchedule:
    """Asks every agent once in an interval: few agents all together, so that an idle leader sleeps, many in groups.

    An agent stays in its group when others come and go, so that none is passed over.

    Attributes:
        next_at: when the next group is due.
    """

    def __init__(self) -> None:
        self.next_at = -math.inf
        self._groups: list[dict[str, None]] = [{} for _ in range(_GROUPS)]
        self._at = [-math.inf] * _GROUPS
        self._size = 0

    def add(self, agent: str) -> None:
        """From now on this agent is asked."""
        group = self._group(agent)
        self._size += agent not in group
        group[agent] = None

    def remove(self, agent: str) -> None:
        """This agent is asked no more."""
        group = self._group(agent)
        if agent in group:
            del group[agent]
            self._size -= 1

    def due(self, now: float, interval: float) -> list[str]:
        """Return the agents that are to be asked now.

        Args:
            now: the time.
            interval: seconds between two signs of life of one agent.
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
