"""A real training with a slow rank, as status, the health port, events and the report of the run show it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Cli
from tests.local.agent.test_health import ask, target
from tests.local.agents import Allocation
from tests.local.waiting import eventually
from tests.planted_faults import planted

Allocate = Callable[..., Allocation]
PACING = str(Path(__file__).with_name("pacing.py"))
LOOK = {"slurm_elastic.agent.run.LOOK": 0.8}


def events(nodes: Allocation, kind: str) -> list[dict[str, Any]]:
    return [each for each in nodes.events() if each["event"] == kind]


@pytest.mark.nightly
def test_a_slow_rank_is_named_until_it_is_slow_no_more(allocate: Allocate, cli: Cli) -> None:
    nodes = allocate(2)
    (nodes.directory / "slow").write_text("1")
    agents = nodes.start_all("--nnodes=2", script=[PACING], constants=LOOK)

    slow = eventually(lambda: events(nodes, "rank_slow"), nodes.log)
    assert [(each["rank"], each["nodes"], each["round"]) for each in slow] == [(1, ["127.0.0.2"], 0)]
    assert slow[0]["relative_score"] < 0.75
    # Of 0.03 s, of workers that may have to wait for a processor.
    assert slow[0]["busy_seconds"] - slow[0]["others_busy_seconds"] > 0.01
    assert slow[0]["busy_seconds"] < slow[0]["step_seconds"] * 1.01
    assert slow[0]["loading_seconds"] < slow[0]["busy_seconds"] / 2, "it does not wait for input"
    out = cli(3, "status 7 --run-dir", str(nodes.directory), "--workers").out
    assert re.search(r"^  slow +since [\d:]+: rank 1 on 127\.0\.0\.2 is slow .*: it works [\d.]+ s per step", out, re.M)
    assert re.search(r"^  1 +127\.0\.0\.2 .* 0\.\d+$", out, re.MULTILINE), out
    page = json.loads(ask(target(nodes, 1), "/status")[1])
    assert [each["rank"] for each in page["slow_ranks"]] == [1]
    assert page["workers"][0]["waiting_seconds"] > 0
    (line,) = re.findall(r"^slurm_elastic_slow_rank_score\{.*$", ask(target(nodes, 1), "/metrics")[1], re.MULTILINE)
    assert 'rank="1"' in line
    assert "slurm_elastic_worker_busy_seconds{" in ask(target(nodes, 2), "/metrics")[1]

    (nodes.directory / "slow").write_text("")
    fast = eventually(lambda: events(nodes, "rank_fast"), nodes.log)
    assert [each["rank"] for each in fast] == [1]
    assert "slow  " not in cli(3, "status 7 --run-dir", str(nodes.directory)).out
    nodes.finish(*agents)
    assert len(events(nodes, "rank_slow")) == 1
    assert nodes.action() == planted("a rank that computes for longer, under a training by gloo").action

    report = json.loads(cli(0, "report 7 --run-dir", str(nodes.directory), "--json").out)
    spent = report["goodput"]["seconds"]
    assert sum(spent.values()) == pytest.approx(report["goodput"]["node_seconds"], rel=0.01)
    assert spent["data_loading"] > 1
    assert spent["collectives"] > 1
    assert spent["checkpoint_save"] > 0
    assert [line.partition(":")[0] for line in report["goodput"]["missing"]] == [
        "queue before the first start of a job"
    ]
    (round_,) = report["rounds"]
    assert [each["rank"] for each in round_["slow_ranks"]] == [1]
