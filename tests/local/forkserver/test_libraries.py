"""The libraries that people train with are learned whole, and work in workers that are forked with them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.local import frameworks
from tests.local.forkserver.helpers.workplace import HANG

CHECKOUT = Path(__file__).parents[3]
NAMES = [
    *("numpy", "scipy", "pandas", "pyarrow", "sklearn", "tokenizers", "datasets", "accelerate", "transformers"),
    *("torchmetrics", "lightning"),
]

# In the environment that has them: learn, and run once more.
DRIVER = f"""\
import logging, pathlib, sys
from tests.local.forkserver.test_imports import Site, asking

logging.basicConfig(level=logging.INFO, stream=sys.stderr)
site = Site(pathlib.Path(sys.argv[1]))
script = pathlib.Path("tests/local/forkserver/helpers/libraries.py").read_text()
cold = site.learn(asking(*{NAMES}) + "sys.stderr.write(f'{{there}}\\\\n')\\n" + script)
warm = site.run()
site.place.close()
assert warm.stdout == cold, (warm.stdout, cold)
print(warm.stderr)
"""


def test_libraries_are_forked_with_and_work(tmp_path: Path) -> None:
    frameworks.require()
    group = {"WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "OMP_NUM_THREADS": "2"}
    environment = {**os.environ, **group, "PYTHONPATH": str(CHECKOUT)}
    command = [frameworks.PYTHON, "-c", DRIVER, tmp_path]
    ended = subprocess.run(
        command, cwd=CHECKOUT, env=environment, capture_output=True, text=True, timeout=3 * HANG, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[0] == str(NAMES), ended.stderr
    assert "anew" not in ended.stderr
