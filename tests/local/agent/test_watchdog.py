"""A worker that hangs is a worker that failed, for its agent and for the run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.local.agents import Allocation, eventually

Allocate = Callable[..., Allocation]
HANGING = str(Path(__file__).parent / "scripts" / "hanging.py")


def test_a_hung_worker_costs_a_restart_and_its_agent_lives(allocate: Allocate) -> None:
    nodes = allocate(2)
    agents = nodes.start_all("--start=warm", "--max-restarts=1", script=[HANGING])
    eventually(lambda: nodes.rounds() == 2, nodes.log)
    nodes.touch("finish")
    assert [agent.wait() for agent in agents] == [0, 0], nodes.log()
    events = {event["event"]: event for event in nodes.events()}
    hang = events["worker_hung"]
    assert (hang["rank"], hang["scope"], hang["signal"], hang["round"]) == (1, "step", "SIGKILL", 0)
    stacks = nodes.run_dir / "logs" / "round_0000" / nodes.nodes[1] / "rank_01" / "stacks.txt"
    assert hang["stacks"] == str(stacks)
    assert f"process {hang['pid']}," in stacks.read_text()
    assert events["round_formed"]["reason"] == "worker_failed"
    assert events["round_formed"]["restarts"] == 1
    pipes = [Path((nodes.directory / f"pipe.{rank}").read_text()) for rank in range(2)]
    assert [pipe.parent.exists() for pipe in pipes] == [False, False]


def test_a_hang_without_restarts_left_is_the_root_cause(allocate: Allocate) -> None:
    nodes = allocate(1)
    agent = nodes.start(1, "--start=warm", "--nproc-per-node=2", script=[HANGING])
    assert agent.wait() == 1
    cause = agent.err[agent.err.rindex("error: ") :]
    assert cause.startswith("error: the run failed: rank 1 on 127.0.0.1 was killed by SIGKILL\n"), cause
    assert "by the watchdog: timer 'step' expired" in cause, cause


@pytest.mark.parametrize("off", [{"TORCHELASTIC_ENABLE_FILE_TIMER": "0"}, {"PET_NO_WATCHDOG": "1"}])
def test_it_can_be_switched_off(allocate: Allocate, off: dict[str, str]) -> None:
    nodes = allocate(1)
    agent = nodes.start(1, **off)
    assert "TORCHELASTIC_TIMER_FILE" not in nodes.seen(0)[0]["env"]
    nodes.touch("finish")
    assert agent.wait() == 0


def test_a_path_that_two_agents_were_given_serves_the_first_only(allocate: Allocate, tmp_path: Path) -> None:
    nodes = allocate(2)
    path = str(tmp_path / "timer")
    agents = nodes.start_all(TORCHELASTIC_TIMER_FILE=path)
    paths = {record["env"]["TORCHELASTIC_TIMER_FILE"] for record in nodes.seen(0).values()}
    assert path in paths
    assert len(paths) == 2
    nodes.touch("finish")
    assert [agent.wait() for agent in agents] == [0, 0]
    assert not Path(path).exists()
