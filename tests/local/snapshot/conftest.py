"""Agents whose memory is given back, and a process that forks those which write for them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_elastic.agent.forkserver.client import ForkServer
from slurm_elastic.agent.forkserver.worker_command import FUNCTION
from tests.local.snapshot.memories import Agents, Fork
from tests.local.subreaper import be_no_subreaper
from tests.local.waiting import HANG


@pytest.fixture(scope="module")
def fork(request: pytest.FixtureRequest) -> Iterator[Fork | None]:
    """In modules with WRITES: what agents with a fork server have. Processes that write import no torch then."""
    if not getattr(request.module, "WRITES", False):
        yield None
        return
    server = ForkServer(FUNCTION, preload=["torch.distributed.checkpoint"])
    assert server.wait_ready(HANG)
    server.refresh()
    yield server.fork_child
    server.close()
    be_no_subreaper()


@pytest.fixture
def agents(tmp_path: Path, fork: Fork | None) -> Iterator[Agents]:
    made = Agents(tmp_path, fork=fork)
    yield made
    made.close()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Where checkpoints are; the first start makes it."""
    return tmp_path / "checkpoints"
