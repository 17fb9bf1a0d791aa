"""Scripts as users write them for torchrun, without a line for slurm_elastic, and a node that is killed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.local import frameworks
from tests.local.agents import ROOT, Allocation, allocation
from tests.local.waiting import eventually

pytestmark = pytest.mark.nightly

Allocate = Callable[..., Allocation]
SCRIPTS = ROOT / "benchmarks" / "scripts"
CHECKPOINT_EVERY = 20
"""Steps, in both scripts."""


def steps(directory: Path) -> dict[int, list[int]]:
    """The numbers of the steps that rank 0 has taken, by round."""
    found: dict[int, list[int]] = {}
    for path in directory.glob("steps/*.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        if lines and lines[0]["rank"] == 0:
            found[lines[0]["round"]] = [line["number"] for line in lines if "step" in line] or [0]
    return found


@pytest.mark.parametrize("script", ["transformers_gpt2.py", "lightning_layers.py"])
def test_an_unchanged_script_goes_on_from_its_own_last_checkpoint(allocate: Allocate, script: str) -> None:
    frameworks.require()
    nodes = allocate(2)
    for name in (script, "marks.py"):
        shutil.copy(SCRIPTS / name, nodes.directory)
    nodes.start_all("--nnodes=1:2", script=[str(nodes.directory / script)], PYTHON_EXEC=str(frameworks.PYTHON))

    eventually(lambda: max(steps(nodes.directory).get(0, [0])) > CHECKPOINT_EVERY + 5, nodes.log)
    nodes.agents[1].kill()
    eventually(lambda: steps(nodes.directory).get(1, [0])[0], nodes.log)
    taken = steps(nodes.directory)
    last, resumed = taken[0][-1], taken[1][0]
    # It takes the steps since its checkpoint again, and no more.
    assert resumed % CHECKPOINT_EVERY == 1
    assert 1 < resumed <= last + 1
    assert last - resumed < 2 * CHECKPOINT_EVERY
    print(f"{script}: killed after step {last}, went on with step {resumed}")


def told(nodes: Allocation) -> list[dict[str, Any]]:
    """What rank 0 has printed."""
    lines = [line.partition("] ")[2] for agent in nodes.agents for line in agent.out.splitlines()]
    return [json.loads(line) for line in lines if line.startswith('{"')]


SHARDED = [
    ("sharded_transformers.py", "fsdp2"),
    ("sharded_transformers.py", "load"),
    ("sharded_lightning.py", "shards"),
]


@pytest.mark.parametrize("script", SHARDED, ids=["transformers", "transformers at load", "lightning"])
def test_a_sharded_model_goes_on_from_memory(tmp_path: Path, script: tuple[str, str]) -> None:
    frameworks.require()
    name, kind = script

    def trained(*words: str) -> list[dict[str, Any]]:
        (directory := tmp_path / "-".join(["run", *words])).mkdir()
        with allocation(directory, 2) as nodes:
            command = [str(ROOT / "tests/local" / name), kind, *words]
            options = ["--nnodes=2", "--max-restarts=1"]
            agents = nodes.start_all(*options, script=command, PYTHON_EXEC=str(frameworks.PYTHON))
            assert [agent.wait() for agent in agents] == [0, 0], nodes.log()
            return told(nodes)

    undisturbed, failed = trained(), trained("7")
    # A worker that fails costs one step at most: the agents of all shards live.
    first = [each["step"] for each in failed if each.get("round") == 0]
    second = [each["step"] for each in failed if each.get("round") == 1]
    assert first[-1] - 1 < second[0] <= first[-1] + 1, failed
    assert second[-1] == 12
    assert [each["weights"] for each in undisturbed if "weights" in each] == [
        each["weights"] for each in failed if "weights" in each
    ]
    assert [each["sharded"] for each in failed if "sharded" in each] == [True]


@pytest.mark.parametrize("script", SHARDED, ids=["transformers", "transformers at load", "lightning"])
def test_a_sharded_model_goes_on_from_copies_with_a_node_fewer(allocate: Allocate, script: tuple[str, str]) -> None:
    frameworks.require()
    nodes = allocate(3)
    name, kind = script
    command = [str(ROOT / "tests/local" / name), kind]
    options = ["--nnodes=2:3", "--snapshot-replicas=1"]
    nodes.start_all(*options, script=command, PYTHON_EXEC=str(frameworks.PYTHON), STEPS="400")
    eventually(lambda: any(entry.get("step", 0) > 60 for entry in told(nodes)), nodes.log)
    nodes.agents[2].kill()
    eventually(lambda: any(entry.get("world") == 2 for entry in told(nodes)), nodes.log)
    first, second = ([entry["step"] for entry in told(nodes) if entry.get("round") == number] for number in (0, 1))
    # All since the newest copy that was whole on other nodes, and neither the weights of the start nor another step.
    assert 1 < second[0] <= first[-1] + 1, nodes.log()
    agents = [agent for agent in nodes.agents if agent is not nodes.agents[2]]
    assert [agent.wait() for agent in agents] == [0, 0], nodes.log()
    assert [entry["sharded"] for entry in told(nodes) if "sharded" in entry] == [True]
    print(f"killed after step {first[-1]}, went on with step {second[0]}")


def test_a_strategy_of_lightning_whose_shards_are_not_kept_is_named(allocate: Allocate) -> None:
    frameworks.require()
    nodes = allocate(2)
    script = [str(ROOT / "tests/local/sharded_lightning.py"), "gathers"]
    agents = nodes.start_all("--nnodes=2", script=script, PYTHON_EXEC=str(frameworks.PYTHON))
    assert [agent.wait() for agent in agents] == [0, 0], nodes.log()
    reason = "ModelParallelStrategy shows no shards, as ModelParallelStrategy(save_distributed_checkpoint=True) does"
    told_why = f"no snapshots are taken, a lost node costs the steps since the last checkpoint: {reason}"
    assert [agent.err.count(told_why) for agent in agents] == [1, 1], nodes.log()
