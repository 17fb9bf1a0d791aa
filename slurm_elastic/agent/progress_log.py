"""The progress of an agent's workers, as JSON lines in the run directory: docs/events.md has the schema.

An agent writes a few lines per round, when its workers start and end. The agent of rank 0 also writes while they train,
at most every 30 s, because all ranks take the same steps.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Sequence
from functools import partial

from slurm_elastic.agent.event_log import json_number, stamp
from slurm_elastic.agent.features import Feature, RunningRound
from slurm_elastic.agent.forkserver.linux import process_state
from slurm_elastic.agent.lifecycle.states import State, Training
from slurm_elastic.agent.line_writer import LineWriter
from slurm_elastic.control.agent_side import TimeUse, WorkerProgress
from slurm_elastic.errors import ExitCode
from slurm_elastic.rendezvous.membership.agents import job_of
from slurm_elastic.rendezvous.transport.messages import Assignment
from slurm_elastic.rundir import RunDir

logger = logging.getLogger("slurm_elastic")

_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 30.0
"""Seconds between two records of the steps of a round; each pause is twice the one before."""
_SILENCE = 60.0
"""Seconds after which a script that has finished no step is told how."""


class ProgressLog(Feature):
    """Records what the workers of this node do in ``progress/<node>.<job>.jsonl`` of the run directory."""

    def __init__(
        self,
        run_dir: RunDir,
        node: str,
        agent: str,
        workers: int,
        max_restarts: int,
        domain: str = "",
    ) -> None:
        self._node, self._agent = node, agent
        job = job_of(agent).rpartition(".")[0]
        self._writer = LineWriter("progress is")
        self._running: RunningRound | None = None
        self._pause, self._due = _FIRST_PAUSE, 0.0
        self._sampled: tuple[int, int | None] = (0, None)
        self._stopping = False
        self._reached: tuple[int, int] | None = None
        self._warned_of_start = self._warned_of_silence = False
        self._writer.start(partial(run_dir.append_progress, node, job), self._until_due, self._sample)
        sizes = {"local_world_size": workers, "max_restarts": max_restarts}
        self._add("agent_started", **sizes, domain=domain, seconds=_seconds_since_start())

    def workers_started(self, running: RunningRound) -> None:
        assignment, place = running.assignment, running.assignment.place
        self._pause, self._due = _FIRST_PAUSE, running.since + _FIRST_PAUSE
        self._sampled, self._stopping = (0, None), False
        # Before the record, which wakes the thread.
        self._running = running
        self._add(
            "workers_started",
            round=assignment.round,
            rank=place.base_rank,
            local_world_size=place.local_world_size,
            world_size=assignment.world_size,
        )

    def state_changed(self, state: State) -> None:
        """Record the steps, and the newest checkpoint before the last one, when the workers are told to stop."""
        running = self._running
        if running is None or self._idle() or not isinstance(state, Training) or state.stop_step is None:
            return
        self._stopping = True
        record = self._steps(running)
        if record is not None:
            self._writer.put(record)

    def round_ended(self, progress: Sequence[WorkerProgress]) -> None:
        running, self._running = self._running, None
        if running is not None:
            self._note_start(running.assignment, progress)
            elapsed = time.monotonic() - running.since
            base = running.assignment.place.base_rank
            workers = [_worker(base, elapsed, worker) for worker in progress]
            self._add("workers_ended", round=running.assignment.round, seconds=round(elapsed, 3), workers=workers)

    def _note_start(self, assignment: Assignment, progress: Sequence[WorkerProgress]) -> None:
        """Warn once of a script that has begun again with its first step, though an earlier round had got further."""
        steps = [(worker.first_step, worker.step) for worker in progress if worker.first_step is not None]
        if not steps:
            return
        first, last = min(step for step, _ in steps), max(step or 0 for _, step in steps)
        if self._reached is not None and first <= min(1, self._reached[1] - 1) and not self._warned_of_start:
            self._warned_of_start = True
            if assignment.place.base_rank == 0:
                logger.warning(
                    "round %d began with step %d again, and round %d had come to step %d: the script loads no"
                    " checkpoint, and may overwrite those that it has saved; see docs/howto/resume.md",
                    *(assignment.round, first, *self._reached),
                )
        self._reached = max((assignment.round, last), self._reached or (0, -1), key=lambda place: place[1])

    def ended(self, exit_code: ExitCode, timeout: float = 5.0) -> None:
        """Record that the agent has left the run, and write out all records, for at most `timeout` seconds."""
        self._running = None
        self._add("agent_ended", exit_code=int(exit_code))
        self._writer.close(timeout)

    def _add(self, event: str, **fields: object) -> None:
        self._writer.put(self._record(event, **fields))

    def _record(self, event: str, **fields: object) -> str:
        return json.dumps({**stamp(event, self._node), "agent": self._agent, **fields})

    def _until_due(self) -> float:
        return _LONGEST_PAUSE if self._idle() else max(0.0, self._due - time.monotonic())

    def _idle(self) -> bool:
        running = self._running
        return running is None or self._stopping or running.assignment.place.base_rank != 0

    def _sample(self) -> str | None:
        running = self._running
        if running is None or self._idle() or time.monotonic() < self._due:
            return None
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        self._due = time.monotonic() + self._pause
        self._note_silence(running)
        return self._steps(running)

    def _note_silence(self, running: RunningRound) -> None:
        """Warn once of a worker whose script could have finished a step since a minute, and has finished none."""
        waits = {worker.local_rank: worker.seconds_awaited or 0.0 for worker in running.progress()}
        rank = next((rank for rank, seconds in waits.items() if seconds >= _SILENCE), None)
        if rank is not None and not self._warned_of_silence:
            self._warned_of_silence = True
            logger.warning(
                "rank %d on %s has finished no step in %d s: unless its first step takes so long, let the script call"
                " step() of its ElasticState, or trainer.should_stop(step), after each step; else a planned stop costs"
                " the steps since the last checkpoint, too",
                *(running.assignment.place.base_rank + rank, self._node, waits[rank]),
            )

    def _steps(self, running: RunningRound) -> str | None:
        workers = [worker for worker in running.progress() if worker.attached]
        if not workers:
            return None
        slowest, first = min(workers, key=lambda worker: worker.boundary), workers[0]
        checkpoints = [worker.checkpoint for worker in workers if worker.checkpoint is not None]
        sampled = slowest.boundary, max(checkpoints, default=None)
        if sampled == self._sampled:
            return None
        self._sampled = sampled
        fields = _steps(slowest, time.monotonic() - running.since)
        fields |= {"checkpoint": sampled[1], "loss": json_number(first.loss), "loss_step": first.loss_step}
        return self._record("progress", round=running.assignment.round, **fields)


def _worker(base: int, elapsed: float, worker: WorkerProgress) -> dict[str, object]:
    fields: dict[str, object] = {"rank": base + worker.local_rank, "reports": worker.attached}
    return fields | _steps(worker, elapsed) if worker.attached else fields


def _steps(worker: WorkerProgress, elapsed: float) -> dict[str, object]:
    """Return the steps of a worker, `elapsed` seconds after the workers have started."""
    return {
        "steps": worker.boundary,
        "step": worker.step,
        "first_step": worker.first_step,
        "checkpoint": worker.checkpoint,
        "loss": json_number(worker.loss),
        "loss_step": worker.loss_step,
        "first": _ago(elapsed, worker.seconds_since_first),
        "last": _ago(elapsed, worker.seconds_since_boundary),
        "before_first": _use(worker.before_first),
        "since_first": _use(worker.since_first),
    }


def _use(use: TimeUse | None) -> dict[str, float | None] | None:
    if use is None:
        return None
    return {name: None if seconds is None else round(seconds, 3) for name, seconds in use._asdict().items()}


def _ago(elapsed: float, seconds: float | None) -> float | None:
    return None if seconds is None else round(max(0.0, elapsed - seconds), 3)


def _seconds_since_start() -> float | None:
    """Return the age of this process: Python and torch were imported before the first record."""
    process = process_state(os.getpid())
    if process is None:
        return None
    started = process.started / os.sysconf("SC_CLK_TCK")
    return round(max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started), 3)
