"""slurm-elastic status of a run that trains: what its agents answer through the leader."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slurm_elastic.cli import main
from tests.local.agents import Allocation
from tests.local.waiting import eventually

Allocate = Callable[..., Allocation]
STEPPING = str(Path(__file__).parents[1] / "stepping.py")
RUNNING = 3


def test_agents_answer_through_the_leader_without_a_health_port(
    allocate: Allocate, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = allocate(2)
    nodes.touch("pace", "0.02")
    agents = nodes.start_all("--nproc-per-node=2", script=[STEPPING])

    def said(*words: str) -> str:
        assert main(["status", "7", "--run-dir", str(nodes.directory), *words]) == RUNNING
        return capsys.readouterr().out

    def told() -> dict[str, Any]:
        code = main(["status", "7", "--run-dir", str(nodes.directory), "--json"])
        out = capsys.readouterr().out
        found: dict[str, Any] = json.loads(out) if code == RUNNING else {}
        return found

    def all_step() -> dict[str, Any]:
        found = told()
        workers = [worker for agent in found.get("agents", ()) for worker in (agent["live"] or {}).get("workers", ())]
        return found if len([worker for worker in workers if worker["steps_per_second"]]) == 4 else {}

    status = eventually(all_step, nodes.story)
    assert (status["live"]["asked"], status["live"]["answered"], status["live"]["silent"]) == (2, 2, "")
    assert status["live"]["leader"].startswith(nodes.leader())
    assert [worker["rank"] for agent in status["agents"] for worker in agent["live"]["workers"]] == [0, 1, 2, 3]
    assert {agent["state"] for agent in status["agents"]} == {"training"}
    out = said("--workers")
    assert "live      2 of 2 agents have answered in" in out
    assert re.search(r"^  127\.0\.0\.\[1-2\] +training +0 +0-3 +\d+", out, re.MULTILINE), out
    assert re.search(r"^  3 +127\.0\.0\.2 +\d+ +in a step for [\d.]+ s +\d+ +[\d.]+", out, re.MULTILINE), out

    # One that does not answer is named, and holds up nobody else.
    agents[1].signal(signal.SIGSTOP)
    out = said()
    agents[1].signal(signal.SIGCONT)
    assert "1 of 2 agents have answered in" in out
    assert "; no answer from 127.0.0.2" in out
    nodes.touch("finish")
    assert [agent.wait() for agent in agents] == [0, 0]
    assert main(["status", "7", "--run-dir", str(nodes.directory), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["live"] is None
