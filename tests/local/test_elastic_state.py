"""One script under plain python, torchrun and agents: ddp.py of the examples, made elastic by a few lines."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.local.agents import ROOT, Allocation
from tests.local.waiting import eventually

HOLDING = str(Path(__file__).with_name("holding.py"))
SCRIPT = str(ROOT / "docs" / "examples" / "elastic_ddp.py")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
STEPS = 24
"""In three epochs, of which each has a smaller last step."""
ENVIRONMENT = {name: os.environ[name] for name in ("PATH", "PYTHONWARNINGS") if name in os.environ}
ENVIRONMENT |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def metrics(directory: Path) -> list[dict[str, Any]]:
    """What rank 0 has reported."""
    return [json.loads(line) for line in (directory / "out" / "metrics.jsonl").read_text().splitlines()]


def epochs(output: str) -> list[float]:
    """The losses at the ends of epochs."""
    return [float(loss) for loss in re.findall(r"epoch \d+: loss (\S+)", output)]


@pytest.mark.nightly
def test_plain_python_goes_on_from_the_checkpoint_of_an_interrupted_run(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    torchrun, directory = [sys.executable, *TORCHRUN, SCRIPT], tmp_path_factory.mktemp("torchrun")
    undisturbed = subprocess.run(
        torchrun, cwd=directory, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True, check=True
    )
    assert [line["step"] for line in metrics(directory)] == [*range(1, STEPS + 1)]
    command = [sys.executable, HOLDING, SCRIPT]
    (tmp_path / "hold").touch()
    with subprocess.Popen(command, cwd=tmp_path, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True) as process:
        eventually((tmp_path / "holds.0.0").exists)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate()
    assert err.rstrip().endswith("KeyboardInterrupt")
    (tmp_path / "hold").unlink()
    done = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, check=True)
    assert [line["step"] for line in metrics(tmp_path)] == [*range(1, 7), *range(6, STEPS + 1)]
    assert epochs(done.stdout) == pytest.approx(epochs(undisturbed.stdout), rel=1e-3)


@pytest.mark.nightly
def test_a_sharded_model_with_dropout_and_a_second_one_go_on_as_if_nothing_had_been(
    allocate: Callable[..., Allocation], tmp_path: Path
) -> None:
    script = str(Path(__file__).with_name("sharded_state.py"))
    command = [sys.executable, *TORCHRUN, script]
    done = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, check=True)
    undisturbed = re.findall(r"step (\d+): (.*)", done.stdout)
    assert [int(step) for step, _ in undisturbed] == [*range(1, 13)]
    nodes = allocate(2)
    nodes.touch("hold")
    agents = nodes.start_all("--nnodes=2", "--max-restarts=1", script=(HOLDING, script))
    holding = [nodes.directory / f"holds.0.{rank}" for rank in range(2)]
    eventually(lambda: all(path.exists() for path in holding), nodes.log)
    os.kill(int(holding[1].read_text()), signal.SIGKILL)
    eventually((nodes.directory / "holds.1.0").exists, nodes.log)
    (nodes.directory / "hold").unlink()
    assert [agent.wait() for agent in agents] == [0, 0], nodes.log()
    steps = re.findall(r"step (\d+): (.*)", agents[0].out)
    assert steps == [*undisturbed[:6], *undisturbed[5:]]
