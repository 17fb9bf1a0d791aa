"""slurm-elastic status and top of a run that trains: what its agents answer through the leader."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slurm_elastic.cli import main
from slurm_elastic.rundir import RunDir
from tests.conftest import Cli
from tests.local.agents import Allocation
from tests.local.waiting import HANG, eventually

Allocate = Callable[..., Allocation]
STEPPING = str(Path(__file__).parents[1] / "stepping.py")
RUNNING = 3


async def watch_and_drain(nodes: Allocation, node: str) -> None:
    """Watch the run by slurm-elastic top until it shows step times, and drain its second node by a key."""
    from textual.coordinate import Coordinate
    from textual.widgets import DataTable

    from slurm_elastic.cli._top_view import TopView

    app = TopView(RunDir.for_run(nodes.directory, nodes.job_id), 1.0)
    async with app.run_test(size=(80, 24)) as pilot:
        table, deadline = app.query_one(DataTable), time.monotonic() + HANG
        while table.row_count < 2 or not re.search("[▁-█]", str(table.get_cell_at(Coordinate(1, 6)))):
            assert time.monotonic() < deadline, nodes.log()
            await pilot.pause(0.05)
        assert table.get_row_at(1)[:4] == [node, "training", "0", "2-3"]
        await pilot.press("down", "d", "y")
        while not app._notifications:
            assert time.monotonic() < deadline, nodes.log()
            await pilot.pause(0.05)
        assert [each.message for each in app._notifications] == [f"asked to leave: {node}"]


def test_agents_answer_through_the_leader_without_a_health_port(
    allocate: Allocate, capsys: pytest.CaptureFixture[str], cli: Cli
) -> None:
    pytest.importorskip("textual")
    nodes = allocate(2)
    nodes.touch("pace", "0.02")
    notify = f"--notify=/bin/cat >> {nodes.directory}/notified"
    agents = nodes.start_led("--nproc-per-node=2", "--nnodes=1:2", notify, script=[STEPPING])

    def said(*words: str) -> str:
        return cli(RUNNING, "status 7 --run-dir", str(nodes.directory), *words).out

    def told() -> dict[str, Any]:
        code = main(["status", "7", "--run-dir", str(nodes.directory), "--json"])
        out = capsys.readouterr().out
        found: dict[str, Any] = json.loads(out) if code == RUNNING else {}
        return found

    def all_step() -> dict[str, Any]:
        found = told()
        workers = [worker for agent in found.get("agents", ()) for worker in (agent["live"] or {}).get("workers", ())]
        return found if len([worker for worker in workers if worker["steps_per_second"]]) == 4 else {}

    status = eventually(all_step, nodes.log)
    assert (status["live"]["asked"], status["live"]["answered"], status["live"]["silent"]) == (2, 2, "")
    assert status["live"]["leader"].startswith(nodes.leader())
    assert [worker["rank"] for agent in status["agents"] for worker in agent["live"]["workers"]] == [0, 1, 2, 3]
    assert {agent["state"] for agent in status["agents"]} == {"training"}
    out = said("--workers")
    assert "live      2 of 2 agents have answered in" in out
    assert re.search(r"^  127\.0\.0\.\[1-2\] +training +0 +0-3 +\d+", out, re.MULTILINE), out
    does = r"in a step for [\d.]+ s(; waits [a-z ]+)?"
    assert re.search(rf"^  3 +127\.0\.0\.2 +\d+ +{does} +\d+ +[\d.]+", out, re.MULTILINE), out

    # An agent that does not answer is named, and the others' reports come all the same.
    agents[1].signal(signal.SIGSTOP)
    out = said()
    agents[1].signal(signal.SIGCONT)
    assert "1 of 2 agents have answered in" in out
    assert "; no answer from 127.0.0.2" in out
    asyncio.run(watch_and_drain(nodes, "127.0.0.2"))
    assert agents[1].wait() == 75
    eventually(lambda: told().get("round") == 1, nodes.log)
    nodes.finish(agents[0])
    # Once, by the agent that led, and before it has ended.
    assert json.loads((nodes.directory / "notified").read_text())["event"] == "finished"
    assert json.loads(cli(0, "status 7 --run-dir", str(nodes.directory), "--json").out)["live"] is None
