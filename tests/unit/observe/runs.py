"""Run directories as agents leave them, made by hand for tests of what reads them."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

from slurm_elastic.observe.records import RunRecords, read_records
from slurm_elastic.rundir import RunDir

START = 1_764_000_000.0
"""Seconds since 1970 at which the runs of tests begin."""


class WrittenRun:
    """A run directory; times are seconds since `START`."""

    def __init__(self, base: Path, run_id: str = "7") -> None:
        self.base = base
        self.run_dir = RunDir.for_run(base, run_id).open()
        self.path = self.run_dir.path

    def event(self, at: float, node: str, event: str, text: str = "", **fields: Any) -> None:
        record = {"time": iso(at), "event": event, "node": node, "schema": 1, "text": text, **fields}
        self.run_dir.append_event(node, json.dumps(record))

    def progress(self, at: float, agent: str, event: str, **fields: Any) -> None:
        node, job = agent.split("/")[0], agent.split("/")[1].split(".")[0]
        record = {"time": iso(at), "event": event, "node": node, "schema": 1, "agent": agent, **fields}
        self.run_dir.append_progress(node, job, json.dumps(record))

    def started(self, at: float, agent: str, *, workers: int = 2, seconds: float = 2.0, domain: str = "") -> None:
        sizes = {"local_world_size": workers, "max_restarts": 3}
        self.progress(at, agent, "agent_started", **sizes, domain=domain, seconds=seconds)

    def round(self, at: float, number: int, agents: list[str], reason: str = "start", restarts: int = 0) -> None:
        """Two workers on each node."""
        nodes = [agent.split("/")[0] for agent in agents]
        places = [
            {"node": node, "agent": agent, "base_rank": 2 * rank, "local_world_size": 2, "rank": rank}
            for rank, (node, agent) in enumerate(zip(nodes, agents, strict=True))
        ]
        record = {
            "round": number,
            "reason": reason,
            "places": places,
            "world_size": 2 * len(agents),
            "restarts": restarts,
            "leader": agents[0],
            "scope": f"{self.run_dir.run_id}.0",
        }
        assert self.run_dir.claim_record(record, "rounds", number)
        fields = {"round": number, "reason": reason, "nodes": nodes, "world_size": 2 * len(agents), "seconds": 0.1}
        self.event(at, nodes[0], "round_formed", f"round {number} formed", **fields, restarts=restarts)
        for rank, agent in enumerate(agents):
            place = {"round": number, "rank": 2 * rank, "local_world_size": 2, "world_size": 2 * len(agents)}
            self.progress(at + 0.1, agent, "workers_started", **place)

    def ended(self, at: float, number: int, agents: list[str], since: float, **worker: Any) -> None:
        """The workers of a round have ended, all with the same progress."""
        for rank, agent in enumerate(agents):
            workers = [{"rank": 2 * rank + local, "reports": bool(worker), **worker} for local in range(2)]
            self.progress(at, agent, "workers_ended", round=number, seconds=at - since, workers=workers)

    def records(self) -> RunRecords:
        return read_records(self.run_dir)


def iso(at: float) -> str:
    when = datetime.datetime.fromtimestamp(START + at, datetime.timezone.utc)
    return when.isoformat(timespec="milliseconds")
