"""Tests reach no Slurm but that of tests/cluster."""

from __future__ import annotations

import logging
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from slurm_elastic.slurm import Controller

PACKAGE = Path(__file__).parents[2] / "slurm_elastic"


def test_no_command_of_slurm_is_the_machines_own(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert Controller().job("1") is None
    assert "tests reach no Slurm" in caplog.text


def test_every_command_that_the_package_calls_is_replaced() -> None:
    text = "".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    commands = set(re.findall(r'"(s(?:acct|acctmgr|batch|cancel|control|info|queue|run))"', text))
    assert {"sbatch", "scontrol", "squeue"} <= commands
    for command in commands:
        done = subprocess.run([shutil.which(command) or ""], capture_output=True, text=True, check=False)
        assert "tests reach no Slurm" in done.stderr, command
