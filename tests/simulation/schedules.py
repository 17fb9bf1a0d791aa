"""All kinds of schedules, by seed, played on all cores."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from tests.simulation import shrink
from tests.simulation.drawing import draw
from tests.simulation.election import faults
from tests.simulation.election.faults import Script
from tests.simulation.election.world import World
from tests.simulation.stopping import StopSchedule
from tests.simulation.violation import Violation

_TRANSCRIPT = 200
"""Lines of a transcript that are shown."""


@dataclass(frozen=True)
class Result:
    """What came of the schedules of one seed: how many they were, and a report on the first that broke a promise."""

    played: int = 1
    failure: str = ""


def play_membership(seed: int) -> Result:
    """One leader that never dies, and everything that can happen to its members."""
    schedule = draw(seed)
    violation = shrink.play(schedule)
    return Result(1, "" if violation is None else shrink.report(schedule, violation))


def play_leaders(seed: int) -> Result:
    """Several possible leaders, to whom things happen at random."""
    script = faults.draw(seed)
    violation = play_script(script)
    return Result(1, "" if violation is None else _report(script, violation, f"SIMULATION_LEADER={seed}"))


def play_strikes(seed: int) -> Result:
    """A short script, once for every message in it and everything that can happen to its leader then."""
    return _struck(faults.script(seed), f"SIMULATION_STRIKE={seed}")


def play_failures(seed: int) -> Result:
    """The same with a script in which workers fail by themselves."""
    return _struck(faults.failing(seed), f"SIMULATION_FAILURE={seed}")


def play_sizes(seed: int) -> Result:
    """Several possible leaders, and a script that cannot use all numbers of nodes."""
    script = sizes(seed)
    violation = play_script(script)
    return Result(1, "" if violation is None else _report(script, violation, f"SIMULATION_SIZES={seed}"))


def sizes(seed: int) -> Script:
    """Of two schedules of few agents the second has one fault more, at a message to the leader."""
    rng = random.Random(f"{seed} struck")
    script = faults.sizes(seed // 2)
    return faults.strike(script, rng.randint(1, 120), rng.choice(faults.STRIKES)) if seed % 2 else script


def _struck(script: Script, repeat: str) -> Result:
    world = World(script)
    violation = _run(world)
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
        return Result(1, f"STOP_SEED={seed}: {error}")
    return Result()


KINDS: dict[str, Callable[[int], Result]] = {
    "membership": play_membership,
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
    return _run(World(script, transcript))


def _run(world: World) -> Violation | None:
    try:
        world.run()
    except Violation as violation:
        return violation
    except Exception as error:  # the machine itself broke: as bad as any broken promise
        return Violation(f"nothing crashes ({type(error).__name__})", repr(error))
    return None


def _report(script: Script, violation: Violation, repeat: str) -> str:
    """The smallest schedule that breaks the same promise, and what happens in it."""
    smaller = True
    while smaller:
        smaller = False
        for index in range(len(script.faults)):
            fewer = replace(script, faults=script.faults[:index] + script.faults[index + 1 :])
            found = play_script(fewer)
            if found is not None and found.promise == violation.promise:
                script, violation, smaller = fewer, found, True
                break
    transcript: list[str] = []
    play_script(script, transcript)
    return "\n".join(
        [
            f"seed {script.seed}, {script.agents} agents{', the first a store' if script.store else ''}: {violation}",
            f"to repeat: {repeat} pytest tests/simulation/test_election.py",
            "",
            *(f"    {fault}" for fault in script.faults),
            "",
            *transcript[-_TRANSCRIPT:],
            f"{violation}",
        ]
    )
