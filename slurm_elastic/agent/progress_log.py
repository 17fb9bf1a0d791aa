"""The progress of an agent's workers, as JSON lines in the run directory: docs/events.md has the schema.

An agent writes a few lines per round, when its workers start and end. The agent of rank 0 also writes while they train,
at most every 30 s, because all ranks take the same steps. A thread of its own writes and samples, because a shared
file system may take long and the agent must not wait for it.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import time
from collections.abc import Sequence
from pathlib import Path
from threading import Thread

from slurm_elastic.agent.event_log import json_number, stamp
from slurm_elastic.agent.features import Feature, RunningRound
from slurm_elastic.control import WorkerProgress
from slurm_elastic.errors import ExitCode
from slurm_elastic.rendezvous.identity import job_of
from slurm_elastic.rundir import RunDir, RunDirError

__all__ = ["ProgressLog"]

logger = logging.getLogger("slurm_elastic")

_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 30.0
"""Seconds between two records of the steps of a round; each pause is twice the one before."""


class ProgressLog(Feature):
    """Records what the workers of this node do.

    Args:
        run_dir: its ``progress/<node>.<job>.jsonl`` gets the records.
        node: Slurm's name of this node.
        agent: identity of the agent.
        workers: number of workers on this node.
        max_restarts: of the run.
    """

    def __init__(self, run_dir: RunDir, node: str, agent: str, workers: int, max_restarts: int) -> None:
        self._run_dir, self._node, self._agent = run_dir, node, agent
        self._job = job_of(agent).rpartition(".")[0]
        self._records: queue.SimpleQueue[dict[str, object] | None] = queue.SimpleQueue()
        self._running: RunningRound | None = None
        self._since = 0.0
        self._pause, self._due = _FIRST_PAUSE, 0.0
        self._sampled: tuple[int, int | None] = (0, None)
        self._thread = Thread(target=self._write, name="slurm-elastic-progress", daemon=True)
        self._thread.start()
        self._add("agent_started", local_world_size=workers, max_restarts=max_restarts, seconds=_seconds_since_start())

    def workers_started(self, running: RunningRound) -> None:
        """See base class."""
        placed, place = running.placed, running.placed.place
        self._since = time.monotonic()
        self._pause, self._due, self._sampled = _FIRST_PAUSE, self._since + _FIRST_PAUSE, (0, None)
        # Before the record, which wakes the thread.
        self._running = running
        self._add(
            "workers_started",
            round=placed.round,
            rank=place.base_rank,
            local_world_size=place.local_world_size,
            world_size=placed.world_size,
        )

    def round_ended(self, progress: Sequence[WorkerProgress]) -> None:
        """See base class."""
        running, self._running = self._running, None
        if running is not None:
            elapsed = time.monotonic() - self._since
            base = running.placed.place.base_rank
            workers = [_worker(base, elapsed, worker) for worker in progress]
            self._add("workers_ended", round=running.placed.round, seconds=round(elapsed, 3), workers=workers)

    def close(self, exit_code: ExitCode, timeout: float = 5.0) -> None:
        """Record the end of the agent, and write out what is left, for at most `timeout` seconds."""
        self._running = None
        self._add("agent_ended", exit_code=int(exit_code))
        self._records.put(None)
        self._thread.join(timeout)

    def _add(self, event: str, **fields: object) -> None:
        self._records.put({**stamp(event, self._node), "agent": self._agent, **fields})

    def _write(self) -> None:
        complained = False
        while True:
            record: dict[str, object] | None
            try:
                record = self._records.get(timeout=_LONGEST_PAUSE if self._idle() else self._until_due())
            except queue.Empty:
                record = self._sample()
                if record is None:
                    continue
            if record is None:
                return
            try:
                self._run_dir.append_progress(self._node, self._job, json.dumps(record))
            except RunDirError as error:
                if not complained:
                    logger.warning("progress is not written: %s", error)
                complained = True

    def _idle(self) -> bool:
        running = self._running
        return running is None or running.placed.place.base_rank != 0

    def _until_due(self) -> float:
        return max(0.0, self._due - time.monotonic())

    def _sample(self) -> dict[str, object] | None:
        """Return a record of the steps, None if there are no new ones."""
        running = self._running
        if running is None or running.placed.place.base_rank != 0 or time.monotonic() < self._due:
            return None
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        self._due = time.monotonic() + self._pause
        workers = [worker for worker in running.progress() if worker.attached]
        if not workers:
            return None
        slowest, first = min(workers, key=lambda worker: worker.boundary), workers[0]
        sampled = slowest.boundary, _newest_checkpoint(workers)
        if sampled == self._sampled:
            return None
        self._sampled = sampled
        fields = {
            "agent": self._agent,
            "round": running.placed.round,
            "steps": slowest.boundary,
            "step": slowest.step,
            "first_step": slowest.first_step,
            "checkpoint": sampled[1],
            "loss": json_number(first.loss),
            "loss_step": first.loss_step,
            "first": _ago(time.monotonic() - self._since, slowest.seconds_since_first),
            "last": _ago(time.monotonic() - self._since, slowest.seconds_since_boundary),
        }
        return {**stamp("progress", self._node), **fields}


def _worker(base: int, elapsed: float, worker: WorkerProgress) -> dict[str, object]:
    found: dict[str, object] = {"rank": base + worker.local_rank, "reports": worker.attached}
    if worker.attached:
        found |= {
            "steps": worker.boundary,
            "step": worker.step,
            "first_step": worker.first_step,
            "checkpoint": worker.checkpoint,
            "loss": json_number(worker.loss),
            "loss_step": worker.loss_step,
            "first": _ago(elapsed, worker.seconds_since_first),
            "last": _ago(elapsed, worker.seconds_since_boundary),
        }
    return found


def _newest_checkpoint(workers: Sequence[WorkerProgress]) -> int | None:
    return max((worker.checkpoint for worker in workers if worker.checkpoint is not None), default=None)


def _ago(elapsed: float, seconds: float | None) -> float | None:
    """Return the time, in seconds since the workers started, that was so many seconds ago."""
    return None if seconds is None else round(max(0.0, elapsed - seconds), 3)


def _seconds_since_start() -> float | None:
    """Return how long this process runs: Python and torch were imported before anything could be recorded."""
    try:
        # proc_pid_stat(5): the name, in parentheses, may contain blanks; starttime is in clock ticks since boot.
        started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None
    return round(max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started), 3)
