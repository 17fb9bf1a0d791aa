"""Faults that are planted into workers, and what the run makes of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from slurm_elastic.failures import explanation, named
from tests.local.agent.faults import FAULTS
from tests.local.agents import Allocation

Allocate = Callable[..., Allocation]


def test_the_cause_of_each_planted_fault_is_named(allocate: Allocate) -> None:
    nodes = allocate(2)
    script = Path(__file__).with_name("faults.py")
    agents = nodes.start_all(f"--max-restarts={len(FAULTS)}", "--nnodes=2", script=[str(script)])
    assert [agent.wait() for agent in agents] == [0, 0], nodes.story()
    ends = [event for event in nodes.events() if event["event"] == "round_ended"]
    assert [(end["cause"], end["rank"]) for end in ends] == [(cause, 1) for cause, _ in FAULTS], nodes.story()
    for end in ends:
        row = named(end["cause"])
        known = ("unknown", "unknown") if row is None else (row.domain.value, row.outlook.value)
        assert (end["domain"], end["outlook"]) == known
        assert explanation(end["cause"]) in end["text"]
    (record,) = (nodes.run_dir / "rounds").glob(f"{len(FAULTS):06d}.json")
    assert json.loads(record.read_text())["restarts"] == len(FAULTS)
