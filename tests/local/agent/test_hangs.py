"""Workers that take no step any more, and workers that nothing can end."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.local.agent.test_health import ask, status, target
from tests.local.agents import Allocation, eventually

Allocate = Callable[..., Allocation]
STEPPING = str(Path(__file__).with_name("stepping.py"))
FREEZER = Path("/sys/fs/cgroup/freezer")


def test_a_worker_without_steps_hangs_and_no_other_does(allocate: Allocate) -> None:
    nodes = allocate(2)
    # As long as a worker that has something to do may have to wait for a processor.
    agents = nodes.start_all("--max-restarts=1", "--hang-timeout=3", script=[STEPPING])
    where = target(nodes, 2)
    eventually(lambda: nodes.rounds() == 2, nodes.story)
    eventually(lambda: status(where)["state"] == "training", nodes.story)
    eventually(lambda: (status(where)["workers"][0]["step"] or 0) > 1000, nodes.story)
    metrics = ask(where, "/metrics")[1]
    nodes.touch("finish")
    assert [agent.wait() for agent in agents] == [0, 0], nodes.story()
    (hang,) = [event for event in nodes.events() if event["event"] == "worker_hung"]
    assert (hang["rank"], hang["scope"], hang["steps"], hang["round"]) == (1, "step", 5, 0)
    seconds = re.search(r"no step for ([\d.]+) s", hang["text"])
    assert seconds is not None, hang["text"]
    assert float(seconds[1]) >= 3
    assert f"process {hang['pid']}," in Path(hang["stacks"]).read_text()
    (ended,) = [event for event in nodes.events() if event["event"] == "round_ended" and event["round"] == 0]
    assert ended["reason"] == "worker_failed"
    steps = next(line for line in metrics.splitlines() if line.startswith("slurm_elastic_steps_total{"))
    assert float(steps.split()[-1]) > 5


def test_a_hang_names_the_rank_on_another_node_that_is_behind(allocate: Allocate) -> None:
    nodes = allocate(2)
    agents = nodes.start_all("--max-restarts=1", script=[STEPPING, "together"])
    eventually(lambda: nodes.rounds() == 2, nodes.story)
    nodes.touch("finish")
    assert [agent.wait() for agent in agents] == [0, 0], nodes.story()
    (ended,) = [event for event in nodes.events() if event["event"] == "round_ended" and event["round"] == 0]
    assert "rank 0: by the watchdog: timer 'all_reduce' expired" in ended["text"]
    assert "; rank 1 is behind: 5 steps in this round, others" in ended["text"]


def test_a_time_without_a_watchdog_is_a_contradiction(allocate: Allocate) -> None:
    agent = allocate(1).start(1, "--hang-timeout=1", "--no-watchdog")
    assert agent.wait() == 2
    assert "error: --hang-timeout needs the watchdog: leave out --no-watchdog" in agent.err


@pytest.fixture
def frozen() -> Iterator[Callable[[int], None]]:
    """Freezes a process: the kernel holds it in uninterruptible sleep, whatever signal comes."""
    if os.geteuid() != 0 or not FREEZER.is_dir():
        pytest.skip("needs root and the freezer of control groups, version 1")
    group = Path(tempfile.mkdtemp(prefix="slurm-elastic-test-", dir=FREEZER))

    def freeze(pid: int) -> None:
        (group / "cgroup.procs").write_text(str(pid))
        (group / "freezer.state").write_text("FROZEN")
        eventually(lambda: (group / "freezer.state").read_text() == "FROZEN\n")

    yield freeze
    (group / "freezer.state").write_text("THAWED")
    eventually(lambda: (group / "cgroup.procs").read_text() == "")
    with contextlib.suppress(OSError):
        group.rmdir()


def test_an_agent_that_cannot_end_its_worker_leaves_the_others(
    allocate: Allocate, frozen: Callable[[int], None]
) -> None:
    nodes = allocate(2)
    first, second = nodes.start_all("--max-restarts=1")
    pid = nodes.seen(0)[1]["pid"]
    frozen(pid)
    nodes.touch("fail.0.0", "1")
    assert nodes.nodes_of(1) == [nodes.nodes[0]]
    assert second.wait() == 1
    text = f"{nodes.nodes[1]} has processes that SIGKILL does not end ({pid} in uninterruptible sleep), so it leaves"
    assert text in second.err
    nodes.touch("finish")
    assert first.wait() == 0


def test_the_end_of_the_run_is_no_success_of_a_node_with_such_a_process(
    allocate: Allocate, frozen: Callable[[int], None]
) -> None:
    nodes = allocate(1)
    nodes.touch("leave-child")
    agent = nodes.start(1)
    nodes.seen(0)
    ((pid, _),) = eventually(lambda: nodes.processes("/bin/sleep").items())
    frozen(pid)
    nodes.touch("finish")
    assert agent.wait() == 1
    assert f"has processes that SIGKILL does not end ({pid} in uninterruptible sleep)" in agent.err
