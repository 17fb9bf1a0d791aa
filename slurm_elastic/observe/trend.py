"""Step times of agents over successive answers of a run, and their picture in one line. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slurm_elastic.observe.views import AgentView, RunStatus

_KEPT = 60
_BLOCKS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The times of one agent's steps.

    Attributes:
        round: Of the last sample.
        steps: Calls of should_stop of its slowest worker in that round.
        at: Seconds since 1970 of the last of them.
        seconds: Per step, averaged over the steps between two samples that differ; the newest last.
    """

    round: int | None
    steps: int
    at: float
    seconds: tuple[float, ...] = ()


def advance(times: Mapping[str, StepTimes], status: RunStatus, now: float) -> dict[str, StepTimes]:
    """Return the step times of all agents that have answered, by identity, with one more answer.

    Args:
        times: Before.
        status: With the answers of agents.
        now: Seconds since 1970 of the answer.
    """
    samples = ((agent.agent, _sample(agent, now)) for agent in status.agents)
    return {name: _next(times.get(name), sample) for name, sample in samples if sample is not None}


def sparkline(values: Sequence[float], width: int) -> str:
    """Return the newest values as blocks, the lowest for 0 and the highest for the largest of them."""
    shown = values[-width:] if width > 0 else ()
    most = max(shown, default=0.0)
    if most <= 0:
        return _BLOCKS[0] * len(shown)
    return "".join(_BLOCKS[min(len(_BLOCKS) - 1, int(value / most * len(_BLOCKS)))] for value in shown)


def _sample(agent: AgentView, now: float) -> StepTimes | None:
    workers = [worker for worker in agent.live.workers if worker.steps] if agent.live is not None else []
    if not workers:
        return None
    slowest = min(workers, key=lambda worker: worker.steps)
    return StepTimes(agent.round, slowest.steps, now - (slowest.step_seconds or 0.0))


def _next(before: StepTimes | None, sample: StepTimes) -> StepTimes:
    if before is None or before.round != sample.round or sample.steps < before.steps:
        return StepTimes(sample.round, sample.steps, sample.at, before.seconds if before is not None else ())
    if sample.steps == before.steps:
        return before
    per_step = max(0.0, sample.at - before.at) / (sample.steps - before.steps)
    return StepTimes(sample.round, sample.steps, sample.at, (*before.seconds, per_step)[-_KEPT:])
