"""torch itself starts the workers where it lacks what the fork server needs."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest

from slurm_elastic.agent.workers.torch_hooks import Hook, Kind, Part
from tests.local.agents import WORKER, Agent, Allocation, eventually
from tests.local.waiting import is_there

Allocate = Callable[..., Allocation]

GAP = {
    "slurm_elastic.agent.workers.torch_hooks.HOOKS": (Hook(Part.FORK_SERVER, Kind.CALLED, "torch.numa.gone:bind", ""),)
}
LINE = "lacks what the fork server needs: gone.bind; torch itself starts the workers"


def _start(nodes: Allocation, *arguments: str, **options: Any) -> list[Agent]:
    return nodes.start_led("--tee=3", *arguments, constants=GAP, **options)


@pytest.mark.parametrize("start", ["warm", "cold"])
def test_a_run_goes_on_after_a_worker_has_failed(allocate: Allocate, start: str) -> None:
    nodes = allocate(2)
    agents = _start(nodes, f"--start={start}", "--nproc-per-node=2", "--max-restarts=1")
    nodes.touch("leave-child")
    first = nodes.seen(0)
    nodes.touch("fail.0.2", "3")
    second = nodes.seen(1)
    assert {record["pid"] for record in first.values()}.isdisjoint(record["pid"] for record in second.values())
    nodes.finish(*agents)
    assert all(agent.err.count(LINE) == 1 for agent in agents)
    # The files of every round are there, and what is shown has a prefix.
    logs = nodes.run_dir / "logs" / "round_0001" / nodes.nodes[1] / "rank_03"
    assert (logs / "stdout.log").read_text() == "working in round 1\n"
    assert f"[{nodes.nodes[1]}/3] working in round 1" in agents[1].out
    assert nodes.processes() == {}


def test_the_agent_keeps_its_signal_handlers(allocate: Allocate) -> None:
    nodes = allocate(1)
    (agent,) = _start(nodes)
    worker = nodes.seen(0)[0]
    agent.signal(signal.SIGTERM)
    assert agent.wait() == 75
    assert "got SIGTERM" in agent.err
    eventually(lambda: not is_there(worker))


def test_a_worker_that_ignores_sigterm_is_killed(allocate: Allocate) -> None:
    nodes = allocate(2)
    agents = _start(nodes, "--nnodes=1:2", script=(str(WORKER), "ignore-term"))
    nodes.seen(0)
    agents[1].kill()
    # A round without the lost node follows at once.
    assert nodes.comes_to(nodes.nodes[:1], after=0) == 1
    nodes.finish(agents[0])


def test_functions(allocate: Allocate) -> None:
    nodes = allocate(1)
    worker = nodes.directory / "function.py"
    worker.write_text("import os\nopen('ran', 'w').write(os.environ['RANK'])\n")
    (agent,) = _start(nodes, "--run-path", script=(str(worker),))
    assert agent.wait() == 0, agent.err
    assert (nodes.directory / "ran").read_text() == "0"
