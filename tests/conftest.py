"""What tests take for granted of the process that runs them."""

from __future__ import annotations

import faulthandler
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import late
from tests.durations import Meter, Recorder

_NO_SLURM = """\
#!/bin/sh
echo "${0##*/}: tests reach no Slurm but that of tests/cluster" >&2
exit 1
"""
_COMMANDS = ("sacct", "sacctmgr", "sbatch", "scancel", "scontrol", "sinfo", "squeue", "srun")

_directory = pytest.StashKey[Path]()

Cli = Callable[..., Any]
"""The fixture `cli`."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--late", metavar="SEED", help="files of runs and looks of tests come late, see tests/late")


def pytest_configure(config: pytest.Config) -> None:
    if (seed := config.getoption("--late")) is not None:
        os.environ[late.VARIABLE] = seed
    config.pluginmanager.register(Meter())
    # A worker of pytest-xdist passes its reports on.
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder())
    # The machine may be one of a cluster, whose controller may be slow or down. The test cluster's machines have a PATH
    # of their own.
    config.stash[_directory] = directory = Path(tempfile.mkdtemp(prefix="no-slurm-"))
    directory.chmod(0o755)
    for command in _COMMANDS:
        (directory / command).write_text(_NO_SLURM)
        (directory / command).chmod(0o755)
    # Where agents note down the directories of runs: not in the home directory of the user who tests.
    os.environ["XDG_STATE_HOME"] = str(directory / "state")
    os.environ["PATH"] = f"{directory}:{os.environ['PATH']}"
    # What a shell without job control starts in the background ignores SIGINT and SIGQUIT (POSIX, Shell Command
    # Language, 2.11), what nohup starts ignores SIGHUP, and so would all that the tests start.
    defaults = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGQUIT: signal.SIG_DFL,
        signal.SIGHUP: signal.SIG_DFL,
    }
    for number, default in defaults.items():
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, default)


def pytest_unconfigure(config: pytest.Config) -> None:
    shutil.rmtree(config.stash[_directory], ignore_errors=True)
    # The limit of pytest's is for tests. A process that a thread or a child keeps from ending says so, too, and ends.
    if seconds := float(config.getini("faulthandler_timeout")):
        faulthandler.dump_traceback_later(seconds, exit=True)


@pytest.fixture(autouse=True)
def _signal_handlers() -> Iterator[None]:
    """A test that leaves a handler behind fails itself, not one that comes after it."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
    before = [signal.getsignal(number) for number in numbers]
    yield
    assert [signal.getsignal(number) for number in numbers] == before


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Run a command line, whose first words may be one text, see it end with this code, and return what it prints."""

    def run(code: int, first: str, *words: str) -> Any:
        from slurm_elastic.cli import main

        assert main([*first.split(), *words]) == code
        return capsys.readouterr()

    return run
