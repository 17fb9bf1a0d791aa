"""docs/examples/fsdp.py with real agents: what a killed node had of the model is on another one."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.local.snapshot.memories import Agents, in_worker

SCRIPT = Path(__file__).parents[3] / "docs/examples/fsdp.py"


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
