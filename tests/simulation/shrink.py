"""A schedule that breaks a promise, made as small as possible and printed for a person."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from tests.simulation.faults import CALM, Action, Arrive, Schedule
from tests.simulation.violation import Violation
from tests.simulation.world import World

MOST_RUNS = 2000
_PLAIN_SETTINGS: dict[str, Any] = {"min_nodes": 1, "max_restarts": 100, "expected_nodes": (), "first_round": 0}


def play(schedule: Schedule) -> Violation | None:
    """Run a schedule; the promise it breaks, or None."""
    try:
        World(schedule).run()
    except Violation as violation:
        return violation
    except Exception as error:  # the machine itself broke: as bad as any broken promise
        return Violation(f"nothing crashes ({type(error).__name__})", repr(error))
    return None


def shrink(schedule: Schedule, violation: Violation) -> Schedule:
    """Leave out and simplify what can be, as long as the same promise is broken."""
    runs = 0
    smaller = True
    while smaller and runs < MOST_RUNS:
        smaller = False
        for attempt in _simpler(schedule):
            runs += 1
            outcome = play(attempt)
            if outcome is not None and outcome.promise == violation.promise:
                schedule, smaller = attempt, True
                break
    return schedule


def _simpler(schedule: Schedule) -> Iterator[Schedule]:
    """Schedules that are a little simpler, the greatest simplification first."""
    actions = schedule.actions
    for arrival in actions:
        if isinstance(arrival, Arrive):
            yield replace(schedule, actions=tuple(action for action in actions if action.agent != arrival.agent))
    alone = tuple(replace(action, cohort=("", 1)) if isinstance(action, Arrive) else action for action in actions)
    ready = tuple(replace(action, seconds=0.0) if isinstance(action, Arrive) else action for action in actions)
    for simpler in (alone, ready):
        if simpler != actions:
            yield replace(schedule, actions=simpler)
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


def report(schedule: Schedule, violation: Violation) -> str:
    """The smallest schedule that was found, what happens in it, and how to see it again."""
    small = shrink(schedule, violation)
    transcript: list[tuple[float, str, str]] = []
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
        f"to repeat: SIMULATION_SEED={schedule.seed} pytest tests/simulation -k promise",
        "",
        f"the smallest schedule found ({len(small.actions)} of {len(schedule.actions)} actions; {noise}):",
        f"    {_settings(small)}",
        *(f"    {action.at:8.3f}  {action.agent:12} {_action(action)}" for action in small.actions),
        "",
        "what happens:",
        *(f"    {moment:8.3f}  {who:12} {what}" for moment, who, what in transcript),
        f"    {final}",
    ]
    return "\n".join(lines)


def _action(action: Action) -> str:
    fields = [field for field in dataclasses.fields(action) if field.name not in ("at", "agent")]
    values = {field.name: (getattr(action, field.name), field.default) for field in fields}
    shown = ", ".join(f"{name}={_value(value)}" for name, (value, default) in values.items() if value != default)
    return f"{type(action).__name__}({shown})"


def _settings(schedule: Schedule) -> str:
    fields = dataclasses.fields(schedule.settings)
    values = {field.name: (getattr(schedule.settings, field.name), field.default) for field in fields}
    return ", ".join(f"{name}={_value(value)}" for name, (value, default) in values.items() if value != default)


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return str(value.value) if isinstance(value, enum.Enum) else repr(value)
