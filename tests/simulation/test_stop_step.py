"""All workers of all nodes stop at one step, whoever is ahead and whoever leads; and the simulation finds mistakes.

STOP_SEEDS: how many schedules to play; STOP_SEED: play this one only.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

from slurm_elastic.control import Agreement, Stop, WorkerControl
from slurm_elastic.control._shared_page import BOUNDARY, HOLD
from tests.simulation.interleaving import Memory
from tests.simulation.schedules import play_all, play_stop
from tests.simulation.stopping import StopSchedule

SEEDS = int(os.environ.get("STOP_SEEDS", "10000"))
ONLY = os.environ.get("STOP_SEED")


def broken(seeds: range, **options: Any) -> str | None:
    """What is broken first."""
    for seed in seeds:
        try:
            StopSchedule(seed, **options).play()
        except (AssertionError, ValueError) as error:
            return f"STOP_SEED={seed}: {error}"
    return None


def test_everybody_stops_at_one_step_in_every_schedule() -> None:
    result = play_all("stop", range(SEEDS)) if ONLY is None else play_stop(int(ONLY))
    assert not result.failure, result.failure


class OneTooEarly(Agreement):
    def hold(self) -> int | None:
        first = self._earliest is None
        answer = super().hold()
        if first and answer is not None and answer > 1:
            self._earliest = answer = answer - 1
        return answer


class TellsAtOnce(Agreement):
    """Sets the stop step without a barrier after the reason."""

    def _barrier(self) -> None:
        if self._earliest is None:
            super()._barrier()


class LooksFirst(WorkerControl):
    def ask(self, step: int | None = None) -> Stop | None:
        held = self._fields[HOLD]
        self._boundary += 1
        self._fields[BOUNDARY] = self._boundary
        return self._wait(self._boundary) if held else None


class ReportsLate(WorkerControl):
    """Reports a boundary when it has passed it."""

    def ask(self, step: int | None = None) -> Stop | None:
        self._boundary += 1
        stop = self._wait(self._boundary) if self._fields[HOLD] else None
        self._fields[BOUNDARY] = self._boundary
        return stop


def no_barrier(memory: Memory) -> None:
    pass


@pytest.mark.parametrize(
    "mistake",
    [
        {"agreement": OneTooEarly},
        {"agreement": TellsAtOnce},
        {"worker": LooksFirst},
        {"worker": ReportsLate},
        {"barrier": no_barrier},
        {"forgetful": True},
    ],
    ids=["one too early", "tells at once", "looks first", "reports late", "no barrier", "lets go of who was told"],
)
def test_a_mistake_is_found(mistake: dict[str, Any]) -> None:
    found = broken(range(500), **mistake)
    assert found is not None
    print(found)
