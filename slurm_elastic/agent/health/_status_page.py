"""The status page: the state of an agent as JSON. Pure functions."""

from __future__ import annotations

import json
from typing import Any

from slurm_elastic._version import __version__
from slurm_elastic.agent.event_log import json_number
from slurm_elastic.agent.health._state import AgentState, Readings, RoundInfo, lost_seconds
from slurm_elastic.slow_ranks import Pace, scores


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
    return {
        "number": round_info.round,
        "reason": round_info.reason,
        "members": round_info.nodes,
        "nodes": round_info.members,
        "node_rank": round_info.node_rank,
        "world_size": round_info.world_size,
        "ranks": [worker.rank for worker in round_info.workers],
    }


def _workers(round_info: RoundInfo, readings: Readings) -> list[dict[str, Any]]:
    by_local_rank = {progress.local_rank: progress for progress in readings.progress}
    return [
        {
            "rank": worker.rank,
            "local_rank": worker.local_rank,
            "pid": worker.pid,
            "step": progress.step if progress else None,
            "step_age_seconds": _rounded(progress.seconds_since_boundary if progress else None),
            "loss": json_number(progress.loss if progress else None),
            **_pace(readings.paces.get(worker.local_rank)),
        }
        for worker in round_info.workers
        for progress in [by_local_rank.get(worker.local_rank)]
    ]


def _pace(pace: Pace | None) -> dict[str, float | None]:
    if pace is None:
        return dict.fromkeys(("pace_seconds", "busy_seconds", "loading_seconds", "waiting_seconds", "individual_score"))
    return {
        "pace_seconds": _precise(pace.step),
        "busy_seconds": _precise(pace.busy),
        "loading_seconds": _precise(pace.loading),
        "waiting_seconds": _precise(pace.waiting),
        "individual_score": _rounded(scores({0: pace})[0].individual),
    }


def _precise(seconds: float) -> float:
    return round(seconds, 6)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)
