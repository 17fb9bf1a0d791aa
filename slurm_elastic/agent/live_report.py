"""The report of an agent for a client that asks what the run does now. Pure but for `process_letters`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from slurm_elastic._version import __version__
from slurm_elastic.agent.event_log import json_number
from slurm_elastic.agent.health.state import AgentState, Readings
from slurm_elastic.agent.watchdog import process_state
from slurm_elastic.control import WorkerProgress
from slurm_elastic.rendezvous.transport.messages import REPORT_LIMIT
from slurm_elastic.slow_ranks import Pace

_SCHEMA = 1
_TEXT_LIMIT = 200
"""Characters of the text of a leave."""


def live_report(state: AgentState, readings: Readings, letters: Mapping[int, str]) -> str:
    """Return the report as JSON of at most `REPORT_LIMIT` characters; docs/events.md has the schema.

    Args:
        state: The present state of the agent.
        readings: What its features know.
        letters: State of each worker's process, as one letter, by process id.
    """
    report: dict[str, Any] = {
        "schema": _SCHEMA,
        "version": __version__,
        "state": state.stage.value,
        "seconds": _rounded(readings.now - state.since),
    }
    round_info = state.round_info
    if round_info is not None:
        report["round"] = round_info.round
    leave = state.leave
    if leave is not None:
        seconds = None if leave.by is None else _rounded(max(0.0, leave.by - readings.now))
        report["leave"] = {"reason": leave.reason, "text": leave.detail[:_TEXT_LIMIT], "seconds": seconds}
    if state.hangs:
        report["hangs"] = state.hangs
    if readings.snapshot_bytes:
        report["snapshot_bytes"] = readings.snapshot_bytes
    if readings.safe_step is not None:
        report["safe_step"] = readings.safe_step
    by_local_rank = {worker.local_rank: worker for worker in readings.progress}
    workers = [
        {"rank": worker.rank, "pid": worker.pid, **_worker(by_local_rank.get(worker.local_rank))}
        | ({"process": letters[worker.pid]} if worker.pid in letters else {})
        | _pace(readings.paces.get(worker.local_rank))
        for worker in (round_info.workers if round_info is not None else ())
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
    fields: dict[str, Any] = {"state": state, "steps": progress.boundary}
    if progress.step is not None:
        fields["step"] = progress.step
    if progress.checkpoint is not None:
        fields["checkpoint"] = progress.checkpoint
    if progress.loss_step is not None:
        fields |= {"loss": json_number(progress.loss), "loss_step": progress.loss_step}
    if last is not None:
        fields["step_seconds"] = _rounded(last)
    if first is not None and last is not None and first > last:
        fields["steps_per_second"] = _rounded((progress.boundary - 1) / (first - last))
    return fields


def _pace(pace: Pace | None) -> dict[str, Any]:
    if pace is None:
        return {}
    return {
        "pace_seconds": _precise(pace.step),
        "busy_seconds": _precise(pace.busy),
        "loading_seconds": _precise(pace.loading),
        "waiting_seconds": _precise(pace.waiting),
        "best_busy_seconds": _precise(pace.best),
        "paces": pace.number,
    }


def _precise(seconds: float) -> float:
    return float(f"{seconds:.4g}")


def _rounded(number: float) -> float:
    return round(number, 3)
