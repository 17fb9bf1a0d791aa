"""Tests reach no Slurm but that of tests/cluster."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "slurm_elastic"


def test_every_command_that_the_package_calls_is_replaced() -> None:
    text = "".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    commands = set(re.findall(r'"(s(?:acct|acctmgr|batch|cancel|control|info|queue|run))"', text))
    assert {"sbatch", "scontrol", "squeue"} <= commands
    for command in commands:
        done = subprocess.run([shutil.which(command) or ""], capture_output=True, text=True, check=False)
        assert "tests reach no Slurm" in done.stderr, command
