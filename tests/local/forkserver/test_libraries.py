"""The libraries that people train with are learned whole, and work in workers that are forked with them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.local import frameworks
from tests.local.forkserver.helpers.workplace import HANG

pytestmark = pytest.mark.nightly

CHECKOUT = Path(__file__).parents[3]
HELPERS = Path(__file__).with_name("helpers")
NAMES = (
    *("numpy", "scipy", "pandas", "pyarrow", "sklearn", "tokenizers", "datasets", "accelerate", "transformers"),
    *("torchmetrics", "lightning"),
)

# In the environment that has them: learn, and run once more.
DRIVER = """\
import logging, pathlib, sys
from tests.local.forkserver.test_imports import Site, asking

logging.basicConfig(level=logging.INFO, stream=sys.stderr)
directory, script, *names = sys.argv[1:]
site = Site(pathlib.Path(directory))
site.with_torch = True
cold = site.learn(asking(*names) + "sys.stderr.write(f'{there}\\\\n')\\n" + pathlib.Path(script).read_text())
warm = site.run()
site.place.close()
assert warm.stdout == cold, (warm.stdout, cold)
print(warm.stderr)
"""


def forked_with(python: str | Path, directory: Path, script: str, *names: str) -> None:
    """Check that a script has the same results with these learned as from a cold start, and that all are learned."""
    group = {"WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "OMP_NUM_THREADS": "2"}
    environment = {**os.environ, **group, "PYTHONPATH": str(CHECKOUT)}
    command = [python, "-c", DRIVER, directory, HELPERS / script, *names]
    ended = subprocess.run(
        command, cwd=CHECKOUT, env=environment, capture_output=True, text=True, timeout=3 * HANG, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[0] == str(list(names)), ended.stderr
    assert "itself" not in ended.stderr


def test_libraries_are_forked_with_and_work(tmp_path: Path) -> None:
    frameworks.require()
    forked_with(frameworks.PYTHON, tmp_path, "libraries.py", *NAMES)


def test_torchvision_is_forked_with_and_works(tmp_path: Path) -> None:
    pytest.importorskip("torchvision", reason="its wheels need a torch with CUDA; pip install torchvision")
    forked_with(sys.executable, tmp_path, "vision.py", "numpy", "PIL", "torchvision")
