"""All kinds of schedules, by seed, played on all cores."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from tests.simulation import shrink
from tests.simulation.drawing import draw, draw_sizes
from tests.simulation.election import faults
from tests.simulation.election.faults import Script
from tests.simulation.election.world import World
from tests.simulation.faults import Schedule
from tests.simulation.stopping import StopSchedule
from tests.simulation.violation import Violation, violation_of

_TRANSCRIPT = 200
"""Lines of a transcript that are shown."""
PER_SCRIPT = 460
"""Schedules that a seed of "strikes" or "failures" is good for, on average."""


@dataclass(frozen=True)
class Result:
    """What came of the schedules of one seed: how many they were, and a report on the first that broke a promise."""

    played: int = 1
    failure: str = ""


def play_membership(seed: int) -> Result:
    """One leader that never dies, and everything that can happen to its members."""
    return _with_one_leader(draw(seed), f"membership:{seed}")


def play_growth(seed: int) -> Result:
    """Nodes that come and go, and a script that can use some numbers of nodes only."""
    return _with_one_leader(draw_sizes(seed), f"growth:{seed}")


def play_leaders(seed: int) -> Result:
    """Several possible leaders, to whom things happen at random."""
    return _with_several_leaders(faults.draw(seed), f"leaders:{seed}")


def play_strikes(seed: int) -> Result:
    """A short script, once for every message in it and everything that can happen to its leader then."""
    return _struck(faults.script(seed), f"strikes:{seed}")


def play_failures(seed: int) -> Result:
    """The same with a script in which workers fail by themselves."""
    return _struck(faults.failing(seed), f"failures:{seed}")


def play_sizes(seed: int) -> Result:
    """Several possible leaders, and a script that cannot use all numbers of nodes."""
    return _with_several_leaders(sizes(seed), f"sizes:{seed}")


def play_asked(asked: str) -> Result:
    """The schedule of a kind and a seed, or of these and a message and what happens there, as in strikes:12:57:kill."""
    kind, seed, *where = asked.split(":")
    if not where:
        return KINDS[kind](int(seed))
    script = faults.failing(int(seed)) if kind == "failures" else faults.script(int(seed))
    transcript: list[str] = []
    violation = play_script(faults.strike(script, int(where[0]), where[1]), transcript)
    print("\n".join(transcript))
    return Result(1, str(violation or ""))


def _with_one_leader(schedule: Schedule, repeat: str) -> Result:
    violation = shrink.play(schedule)
    return Result(1, "" if violation is None else shrink.report(schedule, violation, repeat))


def _with_several_leaders(script: Script, repeat: str) -> Result:
    violation = play_script(script)
    return Result(1, "" if violation is None else _report(script, violation, repeat))


def sizes(seed: int) -> Script:
    """Of two schedules of few agents the second has one fault more, at a message to the leader."""
    rng = random.Random(f"{seed} struck")
    script = faults.sizes(seed // 2)
    return faults.strike(script, rng.randint(1, 120), rng.choice(faults.STRIKES)) if seed % 2 else script


def _struck(script: Script, repeat: str) -> Result:
    world = World(script)
    violation = violation_of(world.run)
    played = 1
    if violation is not None:
        return Result(played, _report(script, violation, repeat))
    # Whichever of the messages before an answer it is lost at, it is the same one.
    losable = {*world.answers.values()}
    for message in range(1, world.messages + 1):
        for kind in faults.STRIKES:
            if kind == "lose" and message not in losable:
                continue
            struck = faults.strike(script, message, kind)
            violation = play_script(struck)
            played += 1
            if violation is not None:
                return Result(played, _report(struck, violation, f"{repeat}:{message}:{kind}"))
    return Result(played)


def play_stop(seed: int) -> Result:
    """All workers of a round stop at one step."""
    try:
        StopSchedule(seed).play()
    except (AssertionError, ValueError) as error:
        return Result(1, f"stop:{seed}: {error}")
    return Result()


KINDS: dict[str, Callable[[int], Result]] = {
    "membership": play_membership,
    "growth": play_growth,
    "leaders": play_leaders,
    "strikes": play_strikes,
    "failures": play_failures,
    "sizes": play_sizes,
    "stop": play_stop,
}


def play_all(kind: str, seeds: Iterable[int], tell: Callable[[int], None] = lambda played: None) -> Result:
    """Play seeds on all cores.

    Args:
        kind: of :data:`KINDS`.
        seeds: the first of them that breaks a promise is reported.
        tell: called now and then, with how many schedules were played since.
    """
    context = multiprocessing.get_context("fork")
    played = 0
    with concurrent.futures.ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=context) as pool:
        try:
            for result in pool.map(KINDS[kind], seeds, chunksize=1 if kind in ("strikes", "failures") else 50):
                played += result.played
                tell(result.played)
                if result.failure:
                    return Result(played, result.failure)
        finally:
            pool.shutdown(cancel_futures=True)
    return Result(played)


def play_script(script: Script, transcript: list[str] | None = None) -> Violation | None:
    """Run a schedule with several possible leaders; the promise it breaks, or None."""
    return violation_of(lambda: World(script, transcript).run())


def _report(script: Script, violation: Violation, repeat: str) -> str:
    """The smallest schedule that breaks the same promise, and what happens in it."""

    def fewer(script: Script) -> Iterator[Script]:
        for index in range(len(script.faults)):
            yield replace(script, faults=script.faults[:index] + script.faults[index + 1 :])

    script = shrink.smallest(script, violation, fewer, play_script)
    transcript: list[str] = []
    violation = play_script(script, transcript) or violation
    return "\n".join(
        [
            f"seed {script.seed}, {script.agents} agents{', the first a store' if script.store else ''}: {violation}",
            f"to repeat: SIMULATION={repeat} pytest tests/simulation/test_schedules.py",
            "",
            *(f"    {fault}" for fault in script.faults),
            "",
            *transcript[-_TRANSCRIPT:],
            f"{violation}",
        ]
    )
