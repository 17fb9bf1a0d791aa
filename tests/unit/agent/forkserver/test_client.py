"""How long the first workers wait for learned imports, as the agent hears of them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from slurm_elastic.agent.forkserver import client
from slurm_elastic.agent.forkserver._processes import Replacement
from slurm_elastic.agent.forkserver.client import ForkServer
from slurm_elastic.agent.forkserver.protocol import Channel
from slurm_elastic.agent.forkserver.worker_command import Program

AWAITED = 15.0
"""Seconds that the fork server tells the agent to wait."""


class Server:
    """The far ends of the channels: a fork server, and a replacement that imports; the agent's time is `now`."""

    def __init__(self, program: Program, pid: int) -> None:
        near_end, self._server = Channel.pair()
        child = Replacement(pid, near_end.detach(), os.pidfd_open(pid))
        self.now = 0.0
        self.client = ForkServer(program, environment={}, child=child)
        near_end, self.replacement = Channel.pair()
        handle = os.pidfd_open(pid)
        self._server.send({"state": "warm", "awaited": AWAITED})
        self._server.send({"state": "replacement", "pid": pid}, [near_end.fileno(), handle])
        near_end.close()
        os.close(handle)

    def seconds_until_ready(self, *, progress: int) -> float:
        """Report progress this many times, each in time, and return how long the agent waited in all."""

        def pass_time() -> bool:
            nonlocal progress
            self.now += AWAITED / 2
            if progress:
                progress -= 1
                self.replacement.send({"state": "progress"})
            return False

        assert self.client.wait_ready(100 * AWAITED, pass_time)
        return self.now


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    script = tmp_path / "train.py"
    script.touch()
    with subprocess.Popen(["sleep", "60"]) as process:
        made = Server(Program(sys.executable, ("-u", str(script))), process.pid)
        monkeypatch.setattr(client, "time", SimpleNamespace(monotonic=lambda: made.now))
        yield made
        process.kill()


def test_workers_wait_no_longer_for_imports_that_do_not_go_on(server: Server) -> None:
    assert AWAITED < server.seconds_until_ready(progress=0) <= 2 * AWAITED
    assert server.client.prepared is None


def test_workers_wait_as_long_as_imports_go_on(server: Server) -> None:
    assert server.seconds_until_ready(progress=8) > 5 * AWAITED
    assert server.client.prepared is None


def test_workers_wait_no_longer_than_the_imports_take(server: Server) -> None:
    server.replacement.send({"state": "progress"})
    server.replacement.send({"state": "complete"})
    assert server.client.wait_ready(0.0)
    assert server.client.prepared is not None
