"""An agent's process: it exists or not, hangs or not, and gives signs of life while it can be heard."""

from __future__ import annotations

import random
import zlib
from typing import TYPE_CHECKING

from tests.simulation.virtual import Process

if TYPE_CHECKING:
    from tests.simulation.world import World


class HeardProcess(Process):
    """What does not depend on the protocol.

    Attributes:
        ever_hung: whether it has ever hung.
        cut: whether its link to the leader carries nothing.
        rng: for all that is not in the schedule; of its own, so that nobody else's actions change it.
    """

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world)
        self.world = world
        self.name = name
        self.rng = random.Random(world.schedule.seed * 0x10001 + zlib.crc32(name.encode()))
        self.cut = self.ever_hung = False
        self._mute_since: float | None = None
        self._heard_again_at = 0.0
        self._beat_offset = self.rng.random()

    def pause(self) -> None:
        """Do nothing more."""
        super().pause()
        self.ever_hung = True
        self._fall_mute()

    def go_on(self) -> None:
        """Do what was postponed, and go on."""
        self.paused = False
        self._be_heard_again()
        super().go_on()

    def beat(self) -> float:
        """When the last sign of life was sent."""
        until = self.world.now if self._mute_since is None else self._mute_since
        interval = self.world.schedule.settings.heartbeat_limit / 3
        beats = (until / interval + self._beat_offset) // 1
        return max(self._heard_again_at, (beats - self._beat_offset) * interval)

    def _fall_mute(self) -> None:
        if self._mute_since is None:
            self._mute_since = self.world.now

    def _be_heard_again(self) -> None:
        if not self.paused and not self.cut:
            self._mute_since = None
            self._heard_again_at = self.world.now
