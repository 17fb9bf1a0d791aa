"""The agent, as it tells of itself: the pages of its health port, and its report for a client that asks about the run.

Both are made of the state that its main loop reports, and of readings of the moment.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from slurm_elastic._version import __version__
from slurm_elastic.agent.event_log import json_number
from slurm_elastic.agent.forkserver.linux import process_state
from slurm_elastic.agent.health.state import AgentState, Readings, Reporter, RoundInfo, Stage, lost_seconds
from slurm_elastic.agent.watchdog.stacks import collect_stacks, resident
from slurm_elastic.control.agent_side import WorkerProgress
from slurm_elastic.rendezvous.transport.messages import REPORT_LIMIT
from slurm_elastic.slow_ranks import Pace, scores

_TRAINS = (Stage.TRAINING, Stage.DONE)


class NodePages:
    """The pages of the health port.

    Attributes:
        sources: The functions that add what they know to readings; called in this order, from any thread.
    """

    def __init__(self, reporter: Reporter) -> None:
        self.reporter = reporter
        self.sources: Sequence[Callable[[Readings], Readings]] = ()

    def last_progress(self) -> int:
        """Return the time of the agent's last activity, by this machine's clock; torch's alive callback.

        The main loop and the watchdog both have to be active.
        """
        return int(time.time() - max(self.reporter.silence(), self.readings().watchdog_age or 0.0))

    def ready(self) -> tuple[bool, str]:
        """Return whether workers train on this node, and the state as text."""
        state = self.reporter.state
        text = state.stage.value
        if state.round_info is not None and state.stage in _TRAINS:
            text += f" in round {state.round_info.assignment.round}"
        return state.stage in _TRAINS, text

    def status(self) -> bytes:
        """Return the status as JSON."""
        return status_page(self.reporter.state, self.readings())

    def metrics(self) -> tuple[bytes, str]:
        """Return the metrics in Prometheus' format, and their content type."""
        # The import of prometheus_client takes a tenth of a second, and most agents never serve this page.
        from slurm_elastic.agent.health.metrics import CONTENT_TYPE, metrics_page

        return metrics_page(self.reporter.state, self.readings()), CONTENT_TYPE

    def stacks(self) -> bytes:
        """Return the stacks of all threads of the workers and of the agent; takes seconds."""
        round_info = self.reporter.state.round_info
        workers = {pid: rank for rank, _, pid in round_info.workers} if round_info is not None else {}
        stacks = collect_stacks(sorted(workers))
        parts = [
            f"rank {workers[pid]}\n{text}" for pid, text in sorted(stacks.items(), key=lambda stack: workers[stack[0]])
        ]
        return "\n".join([*parts, _own_stacks()]).encode(errors="replace")

    def live_report(self) -> str:
        """Return the report for a client that asks what the run does now."""
        state, readings = self.reporter.state, self.readings()
        pids = state.round_info.pids.values() if state.round_info is not None else ()
        letters = {pid: process.state for pid in pids if (process := process_state(pid)) is not None}
        return live_report(state, readings, letters)

    def readings(self) -> Readings:
        """Return the facts of now; from any thread."""
        times = os.times()
        readings = Readings(time.monotonic(), times.user + times.system, resident(os.getpid()))
        for source in self.sources:
            readings = source(readings)
        return readings


def _own_stacks() -> str:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = [f"agent, process {os.getpid()}"]
    for ident, frame in sys._current_frames().items():
        parts.append(f"thread {names.get(ident, ident)}\n{''.join(traceback.format_stack(frame))}")
    return "\n".join(parts)


def status_page(state: AgentState, readings: Readings) -> bytes:
    """Return the page; times in seconds."""
    round_info = state.round_info
    content: dict[str, Any] = {
        "run": state.run,
        "node": state.node,
        "job": state.job,
        "agent": state.agent,
        "version": __version__,
        "state": state.stage.value,
        "state_seconds": _rounded(readings.now - state.since),
        "leader": readings.leader,
        "leads": readings.leads,
        "round": None if round_info is None else _round(round_info),
        "workers": [] if round_info is None else _workers(round_info, readings),
        "slow_ranks": [
            {"rank": slow_rank.rank, "relative_score": _rounded(slow_rank.score.relative), **_pace(slow_rank.pace)}
            for slow_rank in readings.slow
        ],
        "restarts": state.restarts,
        "restarts_left": max(0, state.max_restarts - state.restarts),
        "notices": list(state.notices),
        "lost_seconds": _rounded(lost_seconds(state, readings.now)),
        "watchdog": None
        if readings.watchdog_age is None
        else {"age_seconds": _rounded(readings.watchdog_age), "hangs": state.hangs, "kills": state.kills},
    }
    return json.dumps(content, indent=1).encode() + b"\n"


def _round(round_info: RoundInfo) -> dict[str, Any]:
    assignment = round_info.assignment
    return {
        "number": assignment.round,
        "reason": assignment.reason.value,
        "members": assignment.nodes,
        "nodes": assignment.members,
        "node_rank": assignment.place.rank,
        "world_size": assignment.world_size,
        "ranks": [rank for rank, _, _ in round_info.workers],
    }


def _workers(round_info: RoundInfo, readings: Readings) -> list[dict[str, Any]]:
    by_local_rank = {progress.local_rank: progress for progress in readings.progress}
    return [
        {
            "rank": rank,
            "local_rank": local,
            "pid": pid,
            "step": progress.step if progress else None,
            "step_age_seconds": _rounded(progress.seconds_since_boundary if progress else None),
            "loss": json_number(progress.loss if progress else None),
            **_pace(readings.paces.get(local)),
        }
        for rank, local, pid in round_info.workers
        for progress in [by_local_rank.get(local)]
    ]


def _pace(pace: Pace | None) -> dict[str, float | None]:
    """Return the fields of a pace, which are null where it is unknown; see `_seconds_per_step`."""
    if pace is None:
        return dict.fromkeys((*(f"{part}_seconds" for part in _PARTS), "individual_score"))
    return {**_seconds_per_step(pace), "individual_score": _rounded(scores({0: pace})[0].individual)}


_PARTS = {"pace": "step", "busy": "busy", "loading": "loading", "waiting": "waiting"}
"""The parts of a step by their names in reports, as `Pace` calls them."""


def _seconds_per_step(pace: Pace) -> dict[str, float]:
    return {f"{part}_seconds": _short(getattr(pace, name)) for part, name in _PARTS.items()}


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)


_SCHEMA = 1
_TEXT_LIMIT = 200
"""Characters of the text of a leave."""


def live_report(state: AgentState, readings: Readings, letters: Mapping[int, str]) -> str:
    """Return the report as JSON of at most `REPORT_LIMIT` characters; docs/events.md has the schema."""
    report: dict[str, Any] = {
        "schema": _SCHEMA,
        "version": __version__,
        "state": state.stage.value,
        "seconds": _rounded(readings.now - state.since),
    }
    round_info = state.round_info
    if round_info is not None:
        report["round"] = round_info.assignment.round
    leave = state.leave
    if leave is not None:
        seconds = _rounded(max(0.0, leave.by - readings.now))
        report["leave"] = {"reason": leave.reason, "text": leave.detail[:_TEXT_LIMIT], "seconds": seconds}
    if state.hangs:
        report["hangs"] = state.hangs
    if readings.snapshot_bytes:
        report["snapshot_bytes"] = readings.snapshot_bytes
    if readings.safe_step is not None:
        report["safe_step"] = readings.safe_step
    by_local_rank = {worker.local_rank: worker for worker in readings.progress}
    workers = [
        {"rank": rank, "pid": pid, **_live_worker(by_local_rank.get(local))}
        | ({"process": letters[pid]} if pid in letters else {})
        | _live_pace(readings.paces.get(local))
        for rank, local, pid in (round_info.workers if round_info is not None else ())
    ]
    return _fitted(report, workers)


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


def _live_worker(progress: WorkerProgress | None) -> dict[str, Any]:
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


def _live_pace(pace: Pace | None) -> dict[str, Any]:
    if pace is None:
        return {}
    return {**_seconds_per_step(pace), "best_busy_seconds": _short(pace.best), "paces": pace.number}


def _short(seconds: float) -> float:
    return float(f"{seconds:.4g}")
