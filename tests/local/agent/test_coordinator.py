"""``slurm-elastic coordinator``: a leader without workers, and the run after its end."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable

import pytest

from slurm_elastic.rundir import RunDir
from tests.local.agents import Agent, Allocation, eventually

Allocate = Callable[..., Allocation]

NODES = 3
"""Two for agents, and one for the store."""


@pytest.fixture
def nodes(allocate: Allocate) -> Allocation:
    made = allocate(NODES)
    made.run_dir = made.directory / "elastic-runs" / "mine"
    return made


def start_store(nodes: Allocation, *options: str) -> Agent:
    command = (sys.executable, "-m", "slurm_elastic", "store", "mine", "--nnodes=2:8", f"--local-addr={nodes.nodes[2]}")
    return nodes.command(NODES, *command, *options)


def start_agents(nodes: Allocation, *options: str) -> list[Agent]:
    theirs = "127.0.0.[1-2]"
    return [
        nodes.start(number, "--run-id=mine", "--nnodes=2:8", *options, SLURM_STEP_NODELIST=theirs) for number in (1, 2)
    ]


def test_it_leads_without_a_place_and_an_agent_follows_it_when_it_is_killed(nodes: Allocation) -> None:
    store = start_store(nodes)
    store.expect("leads run mine without workers")
    agents = start_agents(nodes)
    assert nodes.nodes_of(0) == list(nodes.nodes[:2])
    assert nodes.leader() == nodes.nodes[2]

    store.kill()
    nodes.comes_to(nodes.nodes[:2], after=0)
    assert nodes.leader() in nodes.nodes[:2]

    # It comes back and leads nobody; the end of the run is its end, too.
    second = start_store(nodes)
    second.expect("run mine has a leader already")
    nodes.finish(*agents, second)


def test_it_stays_when_all_agents_leave_and_hands_over_when_it_has_to_go(nodes: Allocation) -> None:
    store = start_store(nodes)
    store.expect("leads run mine without workers")
    first = start_agents(nodes)
    nodes.seen(0)
    for agent in first:
        agent.signal(signal.SIGTERM)
    assert [agent.wait() for agent in first] == [75, 75]

    agents = start_agents(nodes)
    assert nodes.nodes_of(1) == list(nodes.nodes[:2])
    assert nodes.leader() == nodes.nodes[2]
    store.signal(signal.SIGTERM)
    store.signal(signal.SIGTERM)
    assert store.wait() == 75
    store.expect("got SIGTERM: an agent will lead the run")
    seen = nodes.seen(nodes.comes_to(nodes.nodes[:2], after=1))
    assert [seen[rank]["env"]["SLURM_ELASTIC_REASON"] for rank in (0, 1)] == ["node_left", "node_left"]
    assert nodes.leader() in nodes.nodes[:2]
    nodes.finish(*agents)
    assert start_store(nodes).wait() == 0


def test_why_the_run_failed_is_said_last_and_written_down(nodes: Allocation) -> None:
    store = start_store(nodes)
    agents = start_agents(nodes)
    nodes.seen(0)
    nodes.touch("fail.0.1", "3")
    assert [agent.wait() for agent in (*agents, store)] == [1, 1, 1]
    assert f"rank 1 on {nodes.nodes[1]} ended with exit code 3" in store.err
    failure = nodes.run_dir / "failures" / "mine.0.json"
    eventually(failure.exists, lambda: store.err)
    assert json.loads(failure.read_text())["node"] == nodes.nodes[1]


def test_one_that_takes_over_after_the_end_of_the_run_ends_too(nodes: Allocation) -> None:
    agents = start_agents(nodes)
    nodes.seen(0)
    store = start_store(nodes)
    store.expect("run mine has a leader already")
    # It hears neither of the end of the run nor of that of its leader.
    store.signal(signal.SIGSTOP)
    for agent in agents:
        agent.kill()
    RunDir.for_run(nodes.directory, "mine").open().mark_done({})
    store.signal(signal.SIGCONT)
    assert store.wait() == 0


@pytest.mark.parametrize("line", ["waits", "goes"])
def test_a_signal_ends_it_where_nobody_trains(nodes: Allocation, line: str) -> None:
    store = start_store(nodes)
    store.expect("leads run mine without workers")
    if line == "waits":
        # There may be one more, for the case that this one ends.
        store = start_store(nodes)
        store.expect("has a leader already")
    store.signal(signal.SIGTERM)
    assert store.wait() == 75
