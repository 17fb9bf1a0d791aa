"""A real training with a slow rank, as status, the health port, events and the report of the run show it."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slurm_elastic.cli import main
from tests.local.agents import Allocation
from tests.local.waiting import eventually
from tests.planted_faults import planted

Allocate = Callable[..., Allocation]
PACING = str(Path(__file__).with_name("pacing.py"))
LOOK = {"slurm_elastic.agent.run.LOOK": 0.8}


def events(nodes: Allocation, kind: str) -> list[dict[str, Any]]:
    found = [
        json.loads(line) for path in nodes.run_dir.glob("events/*.jsonl") for line in path.read_text().splitlines()
    ]
    return [each for each in found if each["event"] == kind]


def health(nodes: Allocation, node: str, page: str) -> str:
    (group,) = json.loads((nodes.run_dir / "health" / f"{node}.7.json").read_text())
    with urllib.request.urlopen(f"http://{group['targets'][0]}{page}", timeout=10) as answer:
        text: str = answer.read().decode()
    return text


@pytest.mark.nightly
def test_a_slow_rank_is_named_until_it_is_slow_no_more(allocate: Allocate, capsys: pytest.CaptureFixture[str]) -> None:
    nodes = allocate(2)
    (nodes.directory / "slow").write_text("1")
    agents = nodes.start_all("--nnodes=2", script=[PACING], constants=LOOK)

    slow = eventually(lambda: events(nodes, "rank_slow"), nodes.log)
    assert [(each["rank"], each["nodes"], each["round"]) for each in slow] == [(1, ["127.0.0.2"], 0)]
    assert slow[0]["relative_score"] < 0.75
    # Of 0.03 s: means of 20 samples a second, of workers that may have to wait for a processor.
    assert slow[0]["busy_seconds"] - slow[0]["others_busy_seconds"] > 0.01
    assert slow[0]["busy_seconds"] < slow[0]["step_seconds"] * 1.01
    assert slow[0]["loading_seconds"] < slow[0]["busy_seconds"] / 2, "it does not wait for input"
    assert main(["status", "7", "--run-dir", str(nodes.directory), "--workers"]) == 3
    out = capsys.readouterr().out
    assert re.search(r"^  slow +rank 1 on 127\.0\.0\.2 since .*: score 0\.\d+, [\d.]+ s per step outside", out, re.M)
    assert re.search(r"^  1 +127\.0\.0\.2 .* 0\.\d+$", out, re.MULTILINE), out
    page = json.loads(health(nodes, "127.0.0.1", "/status"))
    assert [each["rank"] for each in page["slow_ranks"]] == [1]
    assert page["workers"][0]["waiting_seconds"] > 0
    (line,) = re.findall(r"^slurm_elastic_slow_rank_score\{.*$", health(nodes, "127.0.0.1", "/metrics"), re.MULTILINE)
    assert 'rank="1"' in line
    assert "slurm_elastic_worker_busy_seconds{" in health(nodes, "127.0.0.2", "/metrics")

    (nodes.directory / "slow").write_text("")
    fast = eventually(lambda: events(nodes, "rank_fast"), nodes.log)
    assert [each["rank"] for each in fast] == [1]
    assert main(["status", "7", "--run-dir", str(nodes.directory)]) == 3
    assert "slow  " not in capsys.readouterr().out
    nodes.touch("finish")
    assert [agent.wait() for agent in agents] == [0, 0]
    assert len(events(nodes, "rank_slow")) == 1
    assert nodes.action() == planted("a rank that sleeps, under a training by gloo").action

    assert main(["report", "7", "--run-dir", str(nodes.directory), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
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
