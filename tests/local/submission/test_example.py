"""The example of a notebook, executed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[3] / "docs/examples/submit_function.py"


@pytest.mark.parametrize(("where", "world_size"), [pytest.param("local", 4, marks=pytest.mark.nightly), ("debug", 1)])
def test_submit_function(runs: Path, tmp_path: Path, where: str, world_size: int) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--on", where, "--epochs", "50"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert f"'rank': 0, 'world_size': {world_size}" in lines[-3]
    assert lines[-2] == str(list(range(world_size)))
    assert lines[-1] == ("WorkerFailedError" if where == "local" else "")
