"""A schedule that breaks a promise, made as small as possible and printed for a person."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

from tests.simulation.faults import CALM, Action, Arrive, Schedule
from tests.simulation.violation import Violation, violation_of
from tests.simulation.world import World

MOST_RUNS = 2000
_T = TypeVar("_T")
_PLAIN_SETTINGS: dict[str, Any] = {"min_nodes": 1, "max_restarts": 100, "expected_nodes": (), "first_round": 0}


def play(schedule: Schedule) -> Violation | None:
    """Run a schedule; the promise it breaks, or None."""
    return violation_of(lambda: World(schedule).run())


def smallest(
    schedule: _T, violation: Violation, simpler: Callable[[_T], Iterator[_T]], play: Callable[[_T], Violation | None]
) -> _T:
    """Take the first simpler schedule that breaks the same promise, again and again, until none does."""
    runs = 0
    attempts = simpler(schedule)
    while runs < MOST_RUNS and (attempt := next(attempts, None)) is not None:
        runs += 1
        outcome = play(attempt)
        if outcome is not None and outcome.promise == violation.promise:
            schedule, attempts = attempt, simpler(attempt)
    return schedule


def simpler(schedule: Schedule) -> Iterator[Schedule]:
    """Schedules that are a little simpler, the greatest simplification first."""
    actions = schedule.actions
    for arrival in actions:
        if isinstance(arrival, Arrive):
            yield replace(schedule, actions=tuple(action for action in actions if action.agent != arrival.agent))
    alone = tuple(replace(action, cohort=("", 1)) if isinstance(action, Arrive) else action for action in actions)
    ready = tuple(replace(action, seconds=0.0) if isinstance(action, Arrive) else action for action in actions)
    yield from (replace(schedule, actions=each) for each in (alone, ready) if each != actions)
    size = len(actions) // 2
    while size:
        for start in range(0, len(actions), size):
            yield replace(schedule, actions=actions[:start] + actions[start + size :])
        size //= 2
    for name, value in _PLAIN_SETTINGS.items():
        if getattr(schedule.settings, name) != value:
            yield replace(schedule, settings=replace(schedule.settings, **{name: value}))
    if schedule.noise != CALM:
        yield replace(schedule, noise=CALM)
    for name in ("late", "doubled", "delay", "stop", "long_stop"):
        calm = getattr(CALM, name)
        if getattr(schedule.noise, name) != calm:
            yield replace(schedule, noise=replace(schedule.noise, **{name: calm}))
    for index, action in enumerate(actions):
        for rounded in (replace(action, at=round(action.at, digits)) for digits in (0, 1, 2)):
            if rounded.at != action.at and len(f"{rounded.at:g}") < len(f"{action.at:g}"):
                changed = (*actions[:index], rounded, *actions[index + 1 :])
                yield replace(schedule, actions=tuple(sorted(changed, key=lambda action: action.at)))


def report(schedule: Schedule, violation: Violation, repeat: str) -> str:
    """The smallest schedule that was found, what happens in it, and how to see it again."""
    small = smallest(schedule, violation, simpler, play)
    transcript: list[str] = []
    final: BaseException = violation
    try:
        World(small, transcript).run()
    except Exception as error:
        final = error
    noise = "no noise" if small.noise == CALM else f"{small.noise}"
    lines = [
        f"seed {schedule.seed} breaks a promise",
        f"    {final}",
        "",
        f"to repeat: SIMULATION={repeat} pytest tests/simulation/test_schedules.py",
        "",
        f"the smallest schedule found ({len(small.actions)} of {len(schedule.actions)} actions; {noise}):",
        f"    {_changed(small.settings)}",
        *(f"    {action.at:8.3f}  {action.agent:12} {_action(action)}" for action in small.actions),
        "",
        "what happens:",
        *transcript,
        f"    {final}",
    ]
    return "\n".join(lines)


def _action(action: Action) -> str:
    return f"{type(action).__name__}({_changed(action, 'at', 'agent')})"


def _changed(data: Any, *without: str) -> str:
    """The fields that have other values than their defaults."""
    fields = [field for field in dataclasses.fields(data) if field.name not in without]
    values = {field.name: (getattr(data, field.name), field.default) for field in fields}
    return ", ".join(f"{name}={_value(value)}" for name, (value, default) in values.items() if value != default)


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return str(value.value) if isinstance(value, enum.Enum) else repr(value)
