"""The workers of a round: they go step by step together, and stop where they are told."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from slurm_elastic.rendezvous.membership.agents import STEPPED

if TYPE_CHECKING:
    from tests.simulation.agents import SimulatedAgent
    from tests.simulation.world import World

UNUSABLE = "the number of nodes"
"""Why workers fail before their first step."""


class Group:
    """All workers of one round: nobody completes a step that not all have begun.

    Attributes:
        round: its number.
        furthest: the last step that anybody has completed.
        unusable: whether the script cannot use so many nodes.
    """

    def __init__(self, world: World, round_: int, size: int) -> None:
        self.unusable = size in world.schedule.unusable
        self.world = world
        self.round = round_
        self.furthest = 0
        self._needed = size
        self._arrived: list[Workers] = []

    def meet(self, workers: Workers) -> None:
        """Somebody's workers are in the collective of their next step; those that all are in complete it."""
        self._arrived.append(workers)
        self._go_on()

    def part(self, workers: Workers) -> None:
        """Somebody's workers have come to their own end, and the others go on without them."""
        self._needed -= 1
        if workers in self._arrived:
            self._arrived.remove(workers)
        self._go_on()

    def _go_on(self) -> None:
        if self._arrived and len(self._arrived) >= self._needed:
            arrived, self._arrived = self._arrived, []
            for each in arrived:
                self.world.at(self.world.now + each.rng.random() * 0.01, each.complete_step)


class Workers:
    """The workers of one agent in one round, which move as one.

    Attributes:
        boundary: steps completed in this round.
        attached: whether they have asked for the trainer API.
        waiting: whether they wait, before a step, for the agents to agree.
        saving: whether they have come to the step at which they stop.
    """

    def __init__(self, agent: SimulatedAgent, group: Group, *, takes_part: bool, stopped: Callable[[], None]) -> None:
        self.group = group
        self.rng = agent.rng
        self.boundary = 0
        self.attached = self.waiting = self.saving = False
        self._agent = agent
        self._takes_part = takes_part
        self._stopped = stopped
        self._held = self._over = False
        self._stop: int | None = None
        self._since = agent.world.now
        self._later(self.rng.random() * self.rng.choice((0.02, 0.3)), self._start)

    def hold(self) -> int | None:
        """See RoundControl of the product."""
        if not self.attached:
            return None
        self._held = True
        return self.boundary + 1

    def stop_at(self, step: int) -> None:
        """See RoundControl of the product."""
        self._stop = step
        if self.waiting:
            self.waiting = False
            self._go_on_or_stop()

    def end(self) -> None:
        """They exist no more, or do nothing more."""
        self._over = True
        self.waiting = False

    def complete_step(self) -> None:
        """The collective of a step is done; the script asks whether to stop."""
        if self._over:
            return
        self.boundary += 1
        self.group.furthest = max(self.group.furthest, self.boundary)
        self._agent.world.checks.after_boundary(self._agent, self.group.round, self.boundary)
        if self._held and self._stop is None:
            self.waiting = True
        else:
            self._go_on_or_stop()

    def _go_on_or_stop(self) -> None:
        if self._stop is not None and self.boundary >= self._stop:
            self.saving = True
            self._agent.world.checks.after_stop(self._agent, self.group.round, self.boundary)
            self._later(self.rng.random() * 0.2, self._stopped)
        else:
            self._begin_step()

    def _start(self) -> None:
        self.attached = self._takes_part
        if self.group.unusable:
            self._later(self.rng.random() * 0.1, lambda: self._agent.fail(UNUSABLE))
        else:
            self._begin_step()

    def ran(self) -> float:
        """For how long they have run, as an agent says; 0 if they have taken no step."""
        if self.attached:
            return STEPPED if self.boundary else 0.0
        return self._agent.world.now - self._since

    def _begin_step(self) -> None:
        self._later(self.rng.uniform(0.05, 0.4), lambda: self.group.meet(self))

    def _later(self, seconds: float, action: Callable[[], None]) -> None:
        world = self._agent.world
        world.at(world.now + seconds, lambda: None if self._over else action())
