"""How long the first workers wait for learned imports: the fork server is forked from the test, with a shorter time."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slurm_elastic.agent.forkserver import _server, client
from slurm_elastic.agent.forkserver._fast_exit import FastExit
from slurm_elastic.agent.forkserver._import_learner import Attempt, ImportLearner
from slurm_elastic.agent.forkserver._processes import ForkedProcess
from slurm_elastic.agent.forkserver.client import ForkServer
from slurm_elastic.agent.forkserver.protocol import Channel
from slurm_elastic.agent.forkserver.worker_command import Program
from tests.local.forkserver.helpers.workplace import HANG

WAIT = 1.0
Start = Callable[..., ForkServer]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts a fork server whose first replacement imports a module for `seconds`."""
    (tmp_path / "place").mkdir()
    (tmp_path / "place" / "train.py").touch()
    started: list[ForkServer] = []

    def begin(learner: ImportLearner) -> bool:
        learner._due = Attempt(("slow",))
        return True

    def make(seconds: float) -> ForkServer:
        (tmp_path / "slow.py").write_text(f"import time\ntime.sleep({seconds})\n")
        program = Program(sys.executable, ("-u", str(tmp_path / "place" / "train.py")))
        near_end, far_end = Channel.pair()
        settings = {"agent": os.getpid(), "channel": far_end.fileno(), "warm": True, "options": [*program.options]}
        pid = os.fork()
        if pid == 0:
            near_end.close()
            monkeypatch.syspath_prepend(tmp_path)
            monkeypatch.setattr(ImportLearner, "begin", begin)
            try:
                _server.ServerProcess({**settings, "preload": [], "signal_mask": []}, FastExit()).serve()
            finally:
                os._exit(1)
        far_end.close()
        started.append(ForkServer(program, environment={}, child=(near_end, ForkedProcess(pid, os.pidfd_open(pid)))))
        return started[-1]

    yield make
    for each in started:
        each.close()


def test_workers_wait_no_longer_for_imports_that_are_stuck(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_IMPORTS_TIMEOUT", WAIT)
    server = start(1000.0)
    pid, began = server.pid, time.monotonic()
    assert server.wait_ready(HANG)
    assert time.monotonic() - began > WAIT
    assert server.pid == pid


def test_workers_wait_no_longer_than_the_imports_take(start: Start) -> None:
    server = start(0.0)
    pid = server.pid
    assert server.wait_ready(HANG)
    assert server.pid != pid
