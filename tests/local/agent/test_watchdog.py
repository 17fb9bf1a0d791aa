"""A worker that hangs is a worker that failed, for its agent and for the run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.local.agents import Allocation

Allocate = Callable[..., Allocation]
HANGS = """
import os, time
from slurm_elastic import trainer

if os.environ["RANK"] == "1":
    with trainer.expires(after=0.2, scope="step"):
        time.sleep(60)
time.sleep(60)
"""


def test_a_hang_without_restarts_left_is_the_root_cause(allocate: Allocate) -> None:
    nodes = allocate(1)
    nodes.touch("train.py", HANGS)
    agent = nodes.start(1, "--nproc-per-node=2", script=["train.py"])
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
