"""A round with a number of nodes that the script cannot use: the run goes on with one that has worked."""

from __future__ import annotations

from collections.abc import Callable

from tests.local.agents import Allocation
from tests.local.waiting import eventually

Allocate = Callable[..., Allocation]

DIVIDES = """
import os, time
world = int(os.environ["WORLD_SIZE"])
assert 16 % world == 0, f"batch 16 not divisible by {world}"
step = 0
while not os.path.exists("finish"):
    step += 1
    if os.environ["RANK"] == "0":
        open(f"at.{os.environ['SLURM_ELASTIC_ROUND']}", "w").write(str(step))
    time.sleep(0.02)
"""
"""As public examples: the global batch has to be divisible by the number of workers; nothing of ours is called."""


def trained(nodes: Allocation, round_: int, steps: int) -> None:
    path = nodes.directory / f"at.{round_}"
    eventually(lambda: path.exists() and int(path.read_text() or 0) >= steps, nodes.log)


def test_a_node_that_joins_does_not_end_a_run_that_cannot_use_it(allocate: Allocate) -> None:
    nodes = allocate(4)
    nodes.touch("train.py", DIVIDES)
    options = ["--nnodes=1:4", "--max-restarts=0", "--rdzv-conf=last_call_timeout=0.5"]
    first, second = nodes.start_led(*options, "--nnodes=2:4", nodes=2, script=["train.py"])
    trained(nodes, 0, 50)
    third = nodes.start(3, *options, script=["train.py"])
    trained(nodes, 2, 10)
    line = "with 3 nodes train.py failed before its first step (AssertionError: batch 16 not divisible by 3);"
    assert f"round 1 ends: {line} going on with 2: --valid-nodes=2" in first.err, nodes.log()
    assert nodes.nodes_of_round(2) == ["127.0.0.1", "127.0.0.2"]
    assert [record["restarts"] for record in nodes.records()] == [0, 0, 0]
    assert (nodes.records()[2]["unusable"], nodes.records()[2]["ran"][0][0]) == ([3], 2)
    # Four can be used, and have not been tried.
    fourth = nodes.start(4, *options, script=["train.py"])
    trained(nodes, 3, 10)
    assert len(nodes.nodes_of_round(3)) == 4
    nodes.finish(first, second, third, fourth)
