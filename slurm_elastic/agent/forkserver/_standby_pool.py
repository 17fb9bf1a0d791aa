"""Workers that the fork server forks before it is told to, while the agent still looks for its peers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slurm_elastic.agent.forkserver._channel import Channel

__all__ = ["StandbyPool"]


class StandbyPool:
    """Forked processes that wait for an order, each at the other end of a channel. They end when that is closed."""

    def __init__(self, wanted: int) -> None:
        self.wanted = wanted
        """How many are still to be forked."""
        self._waiting: list[tuple[int, Channel]] = []

    def add(self, pid: int, channel: Channel) -> None:
        """Count on this one."""
        self._waiting.append((pid, channel))

    def take(self, order: dict[str, Any], descriptors: Sequence[int]) -> int | None:
        """Hand over an order, and fork no more; returns the process id of who has it, None if nobody waits."""
        self.wanted = 0
        while self._waiting:
            pid, channel = self._waiting.pop(0)
            try:
                channel.send(order, descriptors)
            except OSError:
                # Somebody has killed it.
                continue
            finally:
                channel.close()
            return pid
        return None

    def dismiss(self) -> None:
        """Send home who waits."""
        self.wanted = 0
        for _pid, channel in self._waiting:
            channel.close()
        self._waiting.clear()
