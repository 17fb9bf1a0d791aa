"""Waiting for nodes that have been asked to leave."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_elastic.cli.commands.drain import wait_until_left
from tests.local.waiting import meanwhile
from tests.unit.observe.runs import WrittenRun

A, B, C = "n1/7.0/100", "n2/7.0/200", "n3/7.0/300"


@pytest.fixture
def run(tmp_path: Path) -> WrittenRun:
    run = WrittenRun(tmp_path)
    for agent in (A, B, C):
        run.started(0, agent)
    run.round(1, 0, [A, B, C])
    return run


def leave(run: WrittenRun, *agents: str) -> None:
    run.ended(9, 0, [A, B, C], 1, step=250, checkpoint=250)
    nodes = [agent.split("/")[0] for agent in agents]
    run.event(9, "n1", "round_ended", round=0, reason="node_left", nodes=nodes, detail="drained by me", step=38)
    for node in nodes:
        run.event(9.1, "n1", "node_left", nodes=[node], why="drained")
    for agent in agents:
        run.progress(9.2, agent, "agent_ended", exit_code=75)


def test_it_returns_when_they_have_left_and_says_what_it_cost(
    run: WrittenRun, capsys: pytest.CaptureFixture[str]
) -> None:
    before = run.records()

    def happen() -> None:
        leave(run, C)
        run.round(10, 1, [A, B], "node_left")

    with meanwhile(happen, after=0.05):
        assert wait_until_left(run.run_dir, ["n3"], before, None, pause=0.01) == 0
    assert capsys.readouterr().out == "n3 drained by me: all saved step 250, 2 of 3 nodes go on [round 1 in 0.10 s]\n"


def test_the_last_nodes_leave_no_round_to_wait_for(run: WrittenRun, capsys: pytest.CaptureFixture[str]) -> None:
    before = run.records()
    leave(run, A, B, C)
    assert wait_until_left(run.run_dir, ["n1", "n2", "n3"], before, None) == 0
    assert capsys.readouterr().out == "all 3 nodes drained by me: all saved step 250\n"


def test_it_says_what_those_do_that_stay(run: WrittenRun, capsys: pytest.CaptureFixture[str]) -> None:
    assert wait_until_left(run.run_dir, ["n3"], run.records(), 0) == 1
    line = "after 0 s not left: n3 (training); what they do: slurm-elastic status 7\n"
    assert capsys.readouterr().out == line
