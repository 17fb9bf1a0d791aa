"""Which processes of a node ask the driver for GPUs. The real ones are asked in tests/gpu."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.local.agents import ROOT, allocation

DRIVER = Path(__file__).parent / "scripts/driver.c"
ASKS = "import torch\nFOUND = torch.cuda.is_available(), torch.cuda.device_count()\n"
SCRIPT = """\
import os, sys, torch
print(os.getpid(), *sys.modules["asks"].FOUND, torch.cuda._is_in_bad_fork())
if os.environ["SLURM_ELASTIC_ROUND"] == "0":
    sys.exit(1)
"""


@pytest.mark.skipif(torch.version.cuda is None, reason="this torch is a CPU build, which asks no driver")
@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
@pytest.mark.parametrize("workers", ["1", "auto"])
def test_neither_agent_nor_fork_server_asks_cuda_or_keeps_the_driver(tmp_path: Path, workers: str) -> None:
    for library in ("libcuda.so.1", "libnvidia-ml.so.1"):
        subprocess.run(["cc", "-shared", "-fPIC", "-o", str(tmp_path / library), str(DRIVER)], check=True)
    (tmp_path / "asks.py").write_text(ASKS)
    (tmp_path / "train.py").write_text(SCRIPT)
    log = tmp_path / "driver.log"
    with allocation(tmp_path, 1) as nodes:
        agent = nodes.command(
            1,
            *(sys.executable, "-m", "slurm_elastic", "agent"),
            *(f"--nproc-per-node={workers}", "--max-restarts=1", "--preload=asks", "--redirects=0", "train.py"),
            PYTHONPATH=f"{tmp_path}:{ROOT}",
            LD_LIBRARY_PATH=str(tmp_path),
            TEST_DRIVER_LOG=str(log),
        )
        assert agent.wait() == 0, agent.err
    said = [line.split() for line in agent.out.splitlines() if line.split()[-1] in ("True", "False")]
    assert len(said) >= 2
    assert {tuple(words[-3:]) for words in said} == {("True", "1", "False")}, agent.out
    asked = Counter(tuple(line.split(maxsplit=1)) for line in log.read_text().splitlines())
    # `auto` is asked in a process of its own.
    asking = {pid for pid, what in asked if what == "asks CUDA"}
    assert len(asking) == (workers == "auto")
    assert str(agent.pid) not in {pid for pid, _what in asked}
    held = {pid: asked[pid, "begins NVML"] - asked[pid, "ends NVML"] for pid, _what in asked}
    assert set(held.values()) == {0}
    assert any(what == "begins NVML" for _pid, what in asked)
