"""The report of an agent for a client that asks what the run does now. Pure but for `process_letters`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from slurm_elastic._version import __version__
from slurm_elastic.agent.event_log import json_number
from slurm_elastic.agent.health import Snapshot
from slurm_elastic.agent.watchdog import process_state
from slurm_elastic.control import WorkerProgress
from slurm_elastic.rendezvous.status_requests import REPORT_LIMIT

__all__ = ["live_report", "process_letters"]

_SCHEMA = 1
_TEXT_LIMIT = 200
"""Characters of the text of a leave."""


def live_report(snapshot: Snapshot, progress: Sequence[WorkerProgress], letters: Mapping[int, str], now: float) -> str:
    """Return the report as JSON of at most `REPORT_LIMIT` characters; docs/events.md has the schema.

    Args:
        snapshot: The present state of the agent.
        progress: Of its workers, by local rank.
        letters: State of each worker's process, as one letter, by process id.
        now: Monotonic time.
    """
    report: dict[str, Any] = {
        "schema": _SCHEMA,
        "version": __version__,
        "state": snapshot.stage.value,
        "seconds": _rounded(now - snapshot.since),
    }
    place = snapshot.place
    if place is not None:
        report["round"] = place.round
    leave = snapshot.leave
    if leave is not None:
        seconds = None if leave.by is None else _rounded(max(0.0, leave.by - now))
        report["leave"] = {"reason": leave.reason, "text": leave.detail[:_TEXT_LIMIT], "seconds": seconds}
    if snapshot.hangs:
        report["hangs"] = snapshot.hangs
    by_local_rank = {each.local_rank: each for each in progress}
    workers = [
        {"rank": worker.rank, "pid": worker.pid, **_worker(by_local_rank.get(worker.local_rank))}
        | ({"process": letters[worker.pid]} if worker.pid in letters else {})
        for worker in (place.workers if place is not None else ())
    ]
    return _fitted(report, workers)


def process_letters(pids: Iterable[int]) -> dict[int, str]:
    """Return the states of processes as proc_pid_stat(5) names them, without those that are gone."""
    return {pid: state.state for pid in pids if (state := process_state(pid)) is not None}


def _fitted(report: dict[str, Any], workers: list[dict[str, Any]]) -> str:
    kept = len(workers)
    while True:
        report["workers"] = workers[:kept]
        if kept < len(workers):
            report["workers_left_out"] = len(workers) - kept
        text = json.dumps(report, separators=(",", ":"))
        if len(text) <= REPORT_LIMIT or not kept:
            return text
        # Each has about the same length.
        kept = min(kept - 1, kept * REPORT_LIMIT // len(text))


def _worker(progress: WorkerProgress | None) -> dict[str, Any]:
    if progress is None or not progress.attached:
        return {"state": "unknown"}
    first, last = progress.seconds_since_first, progress.seconds_since_boundary
    state = "stopped" if progress.stopped else "stepping" if progress.boundary else "starting"
    found: dict[str, Any] = {"state": state, "steps": progress.boundary}
    if progress.step is not None:
        found["step"] = progress.step
    if progress.checkpoint is not None:
        found["checkpoint"] = progress.checkpoint
    if progress.loss_step is not None:
        found |= {"loss": json_number(progress.loss), "loss_step": progress.loss_step}
    if last is not None:
        found["step_seconds"] = _rounded(last)
    if first is not None and last is not None and first > last:
        found["steps_per_second"] = _rounded((progress.boundary - 1) / (first - last))
    return found


def _rounded(number: float) -> float:
    return round(number, 3)
