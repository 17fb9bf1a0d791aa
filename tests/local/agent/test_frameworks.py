"""Scripts as users write them for torchrun, without a line for slurm_elastic, and a node that is killed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.local import frameworks
from tests.local.agents import ROOT, Allocation
from tests.local.waiting import eventually

pytestmark = pytest.mark.nightly

Allocate = Callable[..., Allocation]
SCRIPTS = ROOT / "benchmarks" / "framework_scripts"
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


def test_transformers_with_the_callback_loses_one_step_at_most(allocate: Allocate) -> None:
    frameworks.require()
    nodes = allocate(2)
    for name in ("transformers_gpt2.py", "marks.py"):
        shutil.copy(SCRIPTS / name, nodes.directory)
    script = [str(nodes.directory / "transformers_gpt2.py"), "--elastic"]
    nodes.start_all("--nnodes=1:2", script=script, PYTHON_EXEC=str(frameworks.PYTHON))

    eventually(lambda: max(steps(nodes.directory).get(0, [0])) > CHECKPOINT_EVERY + 5, nodes.log)
    nodes.agents[1].kill()
    eventually(lambda: steps(nodes.directory).get(1, [0])[0], nodes.log)
    taken = steps(nodes.directory)
    last, resumed = taken[0][-1], taken[1][0]
    assert resumed in (last, last + 1), nodes.log()
    assert resumed > CHECKPOINT_EVERY + 1
    print(f"killed after step {last}, went on with step {resumed}")
