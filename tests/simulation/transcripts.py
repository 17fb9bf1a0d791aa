"""What happens in the first schedules of every kind, for comparison: `python -m tests.simulation.transcripts`."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tests.simulation.drawing import draw
from tests.simulation.election import faults
from tests.simulation.election.world import World as SuccessionWorld
from tests.simulation.stopping import StopSchedule
from tests.simulation.world import World

SCHEDULES = 120
"""Of each kind. Among so many are some in which two agents are lost in the same moment."""

_SET = re.compile(r"frozenset\({([^{}]*)}\)")


def in_order(text: str) -> str:
    """The same with all sets sorted; as they show themselves, their order is another one in each process."""
    return _SET.sub(lambda found: f"{{{', '.join(sorted(found[1].split(', ')))}}}", text)


def transcripts() -> Iterator[str]:
    """Line by line."""
    for seed in range(SCHEDULES):
        strike = 10 + seed, faults.STRIKES[seed % len(faults.STRIKES)]
        for kind, world, schedule in (
            ("membership", World, draw(seed)),
            ("leaders", SuccessionWorld, faults.draw(seed)),
            ("strike", SuccessionWorld, faults.strike(faults.script(seed), *strike)),
            ("failure", SuccessionWorld, faults.strike(faults.failing(seed), *strike)),
        ):
            transcript: list[str] = []
            world(schedule, transcript).run()
            yield from (f"{kind} {seed}: {line}" for line in transcript)
        stop = StopSchedule(seed)
        stop.play()
        stopped = {rank: step for rank, (step, _) in stop.stops.items()}
        # The last says how often chance was asked on the way.
        yield f"stop {seed}: {stopped}, {stop.passed}, {stop.stop_step}, {stop.chance.random()}"


if __name__ == "__main__":
    for each in transcripts():
        print(in_order(each))
