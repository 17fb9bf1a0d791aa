"""Which processes of a node ask the driver for GPUs. The real ones are asked in tests/gpu."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.local.agents import ROOT, allocation

DRIVER = Path(__file__).parent / "scripts/driver.c"
ASKS = "import torch\nFOUND = torch.cuda.is_available(), torch.cuda.device_count()\n"
USES = "import torch\nFOUND = torch._C._cuda_getDeviceCount() > 0, torch.cuda.device_count()\n"
SCRIPT = """\
import os, sys, torch, asks
print(os.getpid(), os.getppid(), *asks.FOUND, torch.cuda._is_in_bad_fork())
if os.environ["SLURM_ELASTIC_ROUND"] == "0":
    sys.exit(1)
"""


# As on a node with a driver: its device of unified memory, in a mount namespace of the agent's own.
WITH_DEVICE = """\
mkdir "$1/upper" "$1/work"
mount -t overlay overlay -o "lowerdir=/dev,upperdir=$1/upper,workdir=$1/work" /dev
touch /dev/nvidia-uvm
shift
exec "$@"
"""

pytestmark = [
    pytest.mark.skipif(torch.version.cuda is None, reason="this torch is a CPU build, which asks no driver"),
    pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler"),
]


def _place(directory: Path, *libraries: str, module: str = ASKS) -> dict[str, str]:
    """Write the driver, a module that asks for GPUs and a script; return variables with which an agent finds them."""
    for library in libraries:
        subprocess.run(["cc", "-shared", "-fPIC", "-o", str(directory / library), str(DRIVER)], check=True)
    (directory / "asks.py").write_text(module)
    (directory / "train.py").write_text(SCRIPT)
    return {
        "PYTHONPATH": f"{directory}:{ROOT}",
        "LD_LIBRARY_PATH": str(directory),
        "TEST_DRIVER_LOG": str(directory / "driver.log"),
    }


def _agent(workers: str) -> tuple[str, ...]:
    program = (sys.executable, "-m", "slurm_elastic", "agent", f"--nproc-per-node={workers}")
    return (*program, "--max-restarts=1", "--preload=asks", "--redirects=0", "train.py")


def _said(out: str) -> list[list[str]]:
    """Return the words that workers have said: what the module has found, and whether CUDA is of no use."""
    return [line.split()[-3:] for line in out.splitlines() if line.split()[-1] in ("True", "False")]


@pytest.mark.parametrize("workers", ["1", "auto"])
def test_neither_agent_nor_fork_server_nor_worker_asks_cuda_or_the_driver(tmp_path: Path, workers: str) -> None:
    variables = _place(tmp_path, "libcuda.so.1", "libnvidia-ml.so.1")
    with allocation(tmp_path, 1) as nodes:
        agent = nodes.command(1, *_agent(workers), **variables)
        assert agent.wait() == 0, agent.err
    said = _said(agent.out)
    assert len(said) >= 2
    assert all(words == ["True", "1", "False"] for words in said), agent.out
    log = tmp_path / "driver.log"
    asked = {tuple(line.split(maxsplit=1)) for line in log.read_text().splitlines()}
    # What has to be asked, processes of their own ask: for `auto`, and for modules.
    lasting = {
        str(agent.pid),
        *(pid for line in agent.out.splitlines() if line.endswith("False") for pid in line.split()[-5:-3]),
    }
    assert lasting.isdisjoint(pid for pid, _what in asked)
    assert any(what == "asks NVML" for _pid, what in asked)


@pytest.mark.skipif(os.geteuid() != 0, reason="a mount namespace needs root")
def test_a_module_that_uses_cuda_is_left_to_the_workers(tmp_path: Path) -> None:
    variables = _place(tmp_path, "libcuda.so.1", module=USES)
    (tmp_path / "mounts").mkdir()
    with allocation(tmp_path, 1) as nodes:
        apart = ("/usr/bin/unshare", "--mount", "/bin/sh", "-ec", WITH_DEVICE, "sh", str(tmp_path / "mounts"))
        agent = nodes.command(1, *apart, *_agent("1"), **{**variables, "PATH": "/usr/bin:/bin"})
        assert agent.wait() == 0, agent.err
    assert "each worker imports asks itself: importing it initializes CUDA" in agent.err
    assert [(words[0], words[2]) for words in _said(agent.out)] == [("False", "False")] * 2, agent.out
