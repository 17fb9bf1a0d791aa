"""slurm-elastic drain and requeue, spoken to real agents."""

from __future__ import annotations

import json
from collections.abc import Callable

from tests.conftest import Cli
from tests.local.agents import Allocation, eventually

Allocate = Callable[..., Allocation]


def test_drained_nodes_leave_and_the_others_go_on(allocate: Allocate, cli: Cli) -> None:
    nodes = allocate(3)
    leader, second, third = nodes.start_all()
    nodes.seen(0)
    asked, cost = cli(0, "drain 7 127.0.0.[2-3] --wait --run-dir", str(nodes.directory)).out.splitlines()
    assert asked == "asked to leave: 127.0.0.2, 127.0.0.3"
    assert cost.startswith("127.0.0.2, 127.0.0.3 drained")
    assert "1 of 3 nodes goes on" in cost
    assert (second.wait(), third.wait()) == (75, 75)
    assert "127.0.0.2 leaves: drained by " in second.err
    nodes.comes_to(nodes.nodes[:1], after=0)

    def left() -> set[str]:
        return {node for event in nodes.events() if event["event"] == "node_left" for node in event["nodes"]}

    eventually(lambda: left() == {"127.0.0.2", "127.0.0.3"}, lambda: str(nodes.events()))
    nodes.finish(leader)


def test_all_nodes_can_be_drained(allocate: Allocate, cli: Cli) -> None:
    nodes = allocate(1)
    (agent,) = nodes.start_all()
    nodes.seen(0)
    assert cli(0, "drain 7 --all --run-dir", str(nodes.directory)).out == "asked to leave: 127.0.0.1\n"
    assert agent.wait() == 75


def test_a_requeue_reaches_every_agent_and_is_written_down(allocate: Allocate, cli: Cli) -> None:
    nodes = allocate(2)
    agents = nodes.start_all()
    nodes.seen(0)
    asked = cli(0, "requeue 7 --run-dir", str(nodes.directory)).out
    assert asked == "asked to leave and come back: 127.0.0.1, 127.0.0.2\n"
    assert [agent.wait() for agent in agents] == [75, 75]
    notice = json.loads((nodes.run_dir / "notices" / "7.0.json").read_text())
    assert notice["cause"] == "REQUEUE_WANTED"
    # Nobody leads any more.
    assert "run 7 is not running: the leader at " in cli(2, "requeue 7 --run-dir", str(nodes.directory)).err


def test_wrong_names_are_told(allocate: Allocate, cli: Cli) -> None:
    nodes = allocate(1)
    agent = nodes.start(1)
    nodes.seen(0)
    base = str(nodes.directory)
    for words, line in {
        "drain 7 n9": "n9 is not in run 7",
        "drain 8 n9": f"no run 8 in {base}/elastic-runs; slurm-elastic list shows those that are there",
        "drain 7": "name the nodes that have to leave, or give --all",
        "drain 7 127.0.0.1 --all": "name the nodes that have to leave, or give --all",
        "drain a/b --all": f"no run a/b in {base}/elastic-runs; ",
    }.items():
        assert cli(2, words, "--run-dir", base).err.startswith(f"slurm-elastic: error: {line}")
    nodes.finish(agent)
    assert cli(2, "drain 7 --all --run-dir", base).err == "slurm-elastic: error: run 7 is finished\n"
