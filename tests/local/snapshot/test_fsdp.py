"""docs/examples/fsdp.py with real agents: what a killed node had of the model is on another one."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.local.agents import allocation
from tests.local.snapshot.memories import Agents, in_worker
from tests.local.waiting import eventually

SCRIPT = Path(__file__).parents[3] / "docs/examples/fsdp.py"


@pytest.mark.nightly
def test_a_killed_node_costs_few_steps_of_a_sharded_training(tmp_path: Path) -> None:
    with allocation(tmp_path, 3) as nodes:
        script = [str(SCRIPT), "--epochs=3", "--step-time=0.05", "--snapshots"]
        options = ("--nnodes=2:3", "--snapshot-replicas=1", "--failure-domain=echo rack1")
        first, second, third = nodes.start_all(*options, script=script)
        eventually(lambda: "epoch 1: " in first.out, nodes.log)
        second.kill()
        assert [first.wait(), third.wait()] == [0, 0], nodes.log()

        # On a slow machine the first round may be one of two nodes.
        *_, (before, _), (resumed, world) = re.findall(r"step (\d+): begins with world size (\d)", first.out)
        assert world == "2"
        assert re.search(f"start from the snapshot of step {resumed}, taken in round", first.err)
        # The node was killed after step 44, two epochs. One step, and those that all make while one becomes safe, are
        # repeated, on a machine that may be slow.
        assert int(resumed) >= max(30, int(before)), nodes.log()
        assert "epoch 2: step 66" in first.out
        assert nodes.log().count("all nodes are in the failure domain rack1: copies go to its next node") == 1


def trains(directory: Path, until: int | None = None) -> Any:
    """Work that trains two epochs of 22 steps; it ends after the snapshot of a step. It returns what is printed."""

    def work() -> str:
        spec = importlib.util.spec_from_file_location("fsdp_example", SCRIPT)
        assert spec is not None
        assert spec.loader is not None
        example = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(example)
        save = example.snapshot.save

        def save_and_end(step: int, /, **state: Any) -> None:
            save(step, **state)
            if step == until:
                raise KeyboardInterrupt

        example.snapshot.save = save_and_end
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        sys.argv = ["fsdp.py", "--epochs=2", f"--checkpoint-dir={directory}", "--snapshots"]
        arguments: argparse.Namespace = example.parse_arguments()
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(KeyboardInterrupt):
            example.train(arguments, torch.device("cpu"))
        dist.destroy_process_group()
        return out.getvalue()

    return work


def test_workers_that_end_after_the_last_step_of_an_epoch_go_on_with_the_next_one(
    agents: Agents, tmp_path: Path
) -> None:
    # torch.distributed.checkpoint gathers objects, which needs it.
    pytest.importorskip("numpy")
    one = agents.add("one")
    directory = tmp_path / "checkpoints"
    (variables,) = agents.next_round([one])
    # Before the epoch is over for the script.
    assert in_worker(variables, trains(directory, until=22)) == "step 0: begins with world size 1\n"
    (variables,) = agents.next_round([one])
    lines = in_worker(variables, trains(directory, until=44)).splitlines()
    assert lines == ["step 22: begins with world size 1"]
    (variables,) = agents.next_round([one])
    assert in_worker(variables, trains(directory)).splitlines() == ["step 44: begins with world size 1"]
    assert [path.name for path in directory.glob("step_*")] == ["step_00000044"]
