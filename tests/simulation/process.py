"""An agent's process: it exists or not, hangs or not, and gives signs of life while it can be heard."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.simulation.world import World


class Process:
    """What does not depend on the protocol.

    Attributes:
        alive: whether the process exists.
        ever_hung: whether it has ever hung.
        cut: whether its link to the leader carries nothing.
        rng: for all that is not in the schedule; of its own, so that nobody else's actions change it.
    """

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.rng = random.Random(world.schedule.seed * 0x10001 + zlib.crc32(name.encode()))
        self.alive = True
        self.cut = False
        self._hung = self.ever_hung = False
        self._postponed: list[tuple[Callable[..., None], tuple[object, ...]]] = []
        self._mute_since: float | None = None
        self._heard_again_at = 0.0
        self._beat_offset = self.rng.random()

    def later(self, seconds: float, action: Callable[..., None], *arguments: object) -> None:
        """Do something in a while, if the process still exists; after a hang if it hangs."""
        self.world.at(self.world.now + seconds, self._do, action, arguments)

    def _do(self, action: Callable[..., None], arguments: tuple[object, ...]) -> None:
        if not self.alive:
            return
        if self._hung:
            self._postponed.append((action, arguments))
        else:
            action(*arguments)

    def hang(self) -> None:
        """Do nothing more."""
        self._hung = self.ever_hung = True
        self._fall_mute()

    def go_on(self) -> None:
        """Do what was postponed, and go on."""
        self._hung = False
        self._be_heard_again()
        postponed, self._postponed = self._postponed, []
        for action, arguments in postponed:
            self._do(action, arguments)

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
        if not self._hung and not self.cut:
            self._mute_since = None
            self._heard_again_at = self.world.now
