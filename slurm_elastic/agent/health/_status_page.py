"""The status page: the state of an agent as JSON. Pure functions."""

from __future__ import annotations

import json
from typing import Any

from slurm_elastic._version import __version__
from slurm_elastic.agent.event_log import json_number
from slurm_elastic.agent.health._state import Place, Readings, Snapshot, lost_seconds

__all__ = ["status_page"]


def status_page(snapshot: Snapshot, readings: Readings) -> bytes:
    """Return the page; times in seconds."""
    place = snapshot.place
    content: dict[str, Any] = {
        "run": snapshot.run,
        "node": snapshot.node,
        "job": snapshot.job,
        "agent": snapshot.agent,
        "version": __version__,
        "state": snapshot.stage.value,
        "state_seconds": _rounded(readings.now - snapshot.since),
        "leader": readings.leader,
        "leads": readings.leads,
        "round": None if place is None else _round(place),
        "workers": [] if place is None else _workers(place, readings),
        "restarts": snapshot.restarts,
        "restarts_left": max(0, snapshot.max_restarts - snapshot.restarts),
        "notices": list(snapshot.notices),
        "lost_seconds": _rounded(lost_seconds(snapshot, readings.now)),
        "watchdog": None
        if readings.watchdog_age is None
        else {"age_seconds": _rounded(readings.watchdog_age), "hangs": snapshot.hangs, "kills": snapshot.kills},
    }
    return json.dumps(content, indent=1).encode() + b"\n"


def _round(place: Place) -> dict[str, Any]:
    return {
        "number": place.round,
        "reason": place.reason,
        "members": place.nodes,
        "nodes": place.members,
        "node_rank": place.node_rank,
        "world_size": place.world_size,
        "ranks": [worker.rank for worker in place.workers],
    }


def _workers(place: Place, readings: Readings) -> list[dict[str, Any]]:
    steps, ages, losses = dict(readings.steps), dict(readings.step_ages), dict(readings.losses)
    return [
        {
            "rank": worker.rank,
            "local_rank": worker.local_rank,
            "pid": worker.pid,
            "step": steps.get(worker.local_rank),
            "step_age_seconds": _rounded(ages.get(worker.local_rank)),
            "loss": json_number(losses.get(worker.local_rank)),
        }
        for worker in place.workers
    ]


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)
