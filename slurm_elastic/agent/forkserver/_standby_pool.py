"""Processes that the fork server forks before the agent orders workers, while the agent is still in the rendezvous."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slurm_elastic.agent.forkserver._channel import Channel

__all__ = ["StandbyPool"]


class StandbyPool:
    """Forked processes, each of which waits for one order on a channel of its own and ends when that is closed."""

    def __init__(self, wanted: int) -> None:
        self.wanted = wanted
        """The number of processes still to be forked."""
        self._waiting: list[tuple[int, Channel]] = []

    def add(self, pid: int, channel: Channel) -> None:
        """Add a forked process that waits at the other end of `channel`."""
        self._waiting.append((pid, channel))

    def take(self, order: dict[str, Any], descriptors: Sequence[int]) -> int | None:
        """Send an order to one of the processes; from now on no more are forked ahead.

        Returns:
            The process that has received the order; None if no process is left.
        """
        self.wanted = 0
        while self._waiting:
            pid, channel = self._waiting.pop(0)
            try:
                channel.send(order, descriptors)
            except OSError:
                # The process was killed from outside.
                continue
            finally:
                channel.close()
            return pid
        return None

    def close(self) -> None:
        """End the processes that have no order."""
        self.wanted = 0
        for _pid, channel in self._waiting:
            channel.close()
        self._waiting.clear()
